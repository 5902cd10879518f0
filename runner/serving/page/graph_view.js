// The graph: boxes and curves at the places that the server computes. Only the boxes in view are elements.

import { cut, h, Picture, replace, s, seconds, set, SHAPES, words } from "./dom.js";
import { get } from "./page_api.js";
import { countsOf, groupsOf, noteOf } from "./selection.js";

const MARGIN = 24;
const BESIDE = 200; // pixels beside the view
const MANY = 300; // boxes; more are not zoomed out until all are in view

export class GraphView extends Picture {
	scroll = h("div.scroller");

	constructor(run, onpick, onopen) {
		super();
		Object.assign(this, { run, onpick, onopen });
		this.element = h("div.graph", this.scroll, this.zoomed());
	}

	/** Show the tasks. The places are read again if tasks were added. */
	async show(selection) {
		this.selection = selection;
		this.later();
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
			s("path", { d: picture.edges.filter((one) => Boolean(one.at(-1)) === continues).map(curve).join(""), class: continues && "continues" }));
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
		this.later();
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
		const pick = () => (this.groupOf(box.name, this.groups.get(box.name)) ? this.onopen : this.onpick)(box.name);
		return s("g", { class: "box", transform: `translate(${box.x} ${box.y})`, tabindex: "0", role: "button", onclick: pick,
			onkeydown: (event) => this.press(event, box, pick) });
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
			s("text", { x: 10, y: 24, class: "shape", "aria-hidden": "true" }, SHAPES[status] || "○"),
			s("text", { x: 28, y: 17 }, cut(box.name, box.width - 36, 7.3)),
			s("text", { x: 28, y: 32, class: "note" }, cut(told, box.width - 36, 6.1)));
	}

	press(event, from, pick) {
		const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] || [0, 0];
		const isPick = event.key === "Enter" || event.key === " ";
		if (!isPick && !dx && !dy) return;
		event.preventDefault();
		if (isPick) return pick();
		let [nearest, least] = [from, Infinity];
		for (const box of this.boxes.values()) {
			const [x, y] = [box.x - from.x, box.y - from.y];
			const along = x * dx + y * dy;
			const far = along > 0 ? along + 3 * Math.abs(x * dy + y * dx) : Infinity;
			if (far < least) [nearest, least] = [box, far];
		}
		if (!this.nodes.has(nearest.name)) this.scroll.scrollTo(nearest.x * this.zoom, nearest.y * this.zoom);
		this.draw();
		this.nodes.get(nearest.name).focus();
	}
}

/** Return the path of an edge: a start, then for each curve its end and the end of a level line. */
function curve([x, y, ...numbers]) {
	let path = `M${x} ${y}`;
	for (let n = 0; n + 2 < numbers.length; n += 3) {
		const [left, to, right] = numbers.slice(n, n + 3);
		const middle = (x + left) / 2;
		path += `C${middle} ${y} ${middle} ${to} ${left} ${to}H${right}`;
		[x, y] = [right, to];
	}
	return path;
}
