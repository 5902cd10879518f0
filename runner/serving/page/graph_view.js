// The graph: boxes and curves at the places that the server computes. Only the boxes in view are elements.

import { addressOf, h, replace, s, seconds, set, SHAPES, words, zoomButtons } from "./dom.js";
import { get } from "./page_api.js";
import { countsOf, groupsOf, noteOf } from "./task_lists.js";

const MARGIN = 24;
const BESIDE = 200; // pixels beside the view
const MANY = 300; // boxes; more are not zoomed out until all are in view

export class GraphView {
	zoom = 1;
	scroll = h("div.scroller", { onscroll: () => this.draw() });

	constructor(run, onpick, onopen) {
		Object.assign(this, { run, onpick, onopen });
		new ResizeObserver(() => this.draw()).observe(this.scroll);
		this.element = h("div.graph", this.scroll, zoomButtons((by) => this.scale(by)));
	}

	/** Show the tasks. The places are read again if tasks were added. */
	async show(selection) {
		this.selection = selection;
		this.draw();
		const { size } = selection.rows;
		if (this.size === size) return;
		this.size = size;
		const picture = await get(`/page/runs/${encodeURIComponent(this.run)}/graph`).catch(() => null);
		if (picture) this.build(picture);
		else this.size = NaN; // the next change tries again
	}

	build(picture) {
		const isFirst = !this.picture;
		Object.assign(this, { picture, width: picture.width + 2 * MARGIN, height: picture.height + 2 * MARGIN });
		this.boxes = new Map(picture.boxes.map((box) => [box.name, box]));
		this.nodes = new Map();
		const edges = [true, false].map((continues) =>
			s("path", { d: picture.edges.filter((edge) => edge.continues === continues).map(({ path }) => path).join(""), class: continues && "continues" }));
		this.svg = s("svg", { role: "group", label: "Graph of the tasks", viewBox: `${-MARGIN} ${-MARGIN} ${this.width} ${this.height}` },
			s("g", { class: "edges" }, edges));
		replace(this.scroll, this.svg);
		this.scale(isFirst ? 0 : 1);
	}

	scale(by) {
		if (!this.picture) return;
		const fitting = Math.min(this.scroll.clientWidth / this.width, this.scroll.clientHeight / this.height);
		this.zoom = by ? Math.min(Math.max(this.zoom * by, this.boxes.size > MANY ? 0.4 : 0.05), 3) : Math.min(1, Math.max(fitting, 0.55));
		this.svg.style.width = `${this.width * this.zoom}px`;
		this.svg.style.height = `${this.height * this.zoom}px`;
		this.draw();
	}

	draw() {
		if (!this.picture || !this.scroll.isConnected) return;
		const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.scroll;
		const [left, top, wide, high] = [scrollLeft, scrollTop, clientWidth, clientHeight].map((one) => one / this.zoom);
		this.groups = groupsOf(this.selection.all);
		for (const box of this.boxes.values()) {
			const isInView = box.x < left + wide + BESIDE && box.x + box.width > left - BESIDE && box.y < top + high + BESIDE && box.y + box.height > top - BESIDE;
			let node = this.nodes.get(box.name);
			if (isInView && !node) {
				node = this.make(box);
				this.nodes.set(box.name, node);
				this.svg.append(node);
			} else if (!isInView && node && node !== document.activeElement) {
				node.remove();
				this.nodes.delete(box.name);
			}
			if (isInView) this.update(box, node, this.groups.get(box.name));
		}
	}

	make(box) {
		const pick = (event) => {
			event.preventDefault();
			(this.groupOf(box.name, this.groups.get(box.name)) ? this.onopen : this.onpick)(box.name);
		};
		return s("a", { class: "box", transform: `translate(${box.x} ${box.y})`, href: addressOf(this.run, box.name), onclick: pick });
	}

	/** Return the group of a box that stands for all of its parts. */
	groupOf(name, group) {
		return group && !this.boxes.has(group.parts[0].id) ? group : null;
	}

	update(box, node, parts) {
		const { selection } = this;
		const group = this.groupOf(box.name, parts);
		const row = selection.rows.get(box.name);
		if (!row && !group) return;
		const { status } = group || row;
		const told = group ? countsOf(group) : `${words(status)} ${seconds(selection.took(row))}`;
		const dim = selection.filtered && !(group ? group.parts : [row]).some((one) => selection.fits(one));
		set(node, { status });
		node.setAttribute("class", `box ${status}${dim ? " dim" : ""}${box.name === selection.task ? " chosen" : ""}${group ? " group" : ""}`);
		const full = `${box.name}: ${told}${!group && noteOf(row) ? `. ${noteOf(row)}` : ""}`;
		if (node.told === full) return;
		node.told = full;
		replace(node, s("title", {}, full), s("rect", { width: box.width, height: box.height, rx: 6 }),
			s("text", { x: 10, y: 24, class: "shape", "aria-hidden": "true" }, SHAPES[status]),
			s("text", { x: 28, y: 17 }, cut(box.name, box.width - 36, 7.3)),
			s("text", { x: 28, y: 32, class: "note" }, cut(told, box.width - 36, 6.1)));
	}
}

/** Return the text, cut to `width` if a character takes `wide`. */
const cut = (text, width, wide) => (text.length * wide <= width ? text : `${text.slice(0, Math.max(1, Math.floor(width / wide) - 1))}…`);
