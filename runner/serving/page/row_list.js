// The list of the tasks: only the lines in view are elements, so ten thousand tasks scroll quickly.

import { cost, h, icon, replace, seconds, set, tokens, words } from "./dom.js";
import { countsOf, moreOf, noteOf } from "./selection.js";

const BESIDE = 12; // lines above and below the view
const NARROW = matchMedia("(max-width: 640px)");

export class TaskList {
	cursor = 0;
	pool = new Map();
	space = h("div.space", { role: "presentation" });

	constructor(onopen, ontoggle) {
		Object.assign(this, { onopen, ontoggle });
		this.element = this.list = h("plait-tasks", {
			role: "treegrid", tabindex: "0", label: "Tasks",
			onscroll: () => this.draw(), onkeydown: (event) => this.press(event), onclick: ({ target }) => target.closest(".line")?.n >= 0 && this.open(target.closest(".line").n),
		}, this.space);
		new ResizeObserver(() => this.draw()).observe(this.list);
	}

	get lines() {
		return this.selection.lines;
	}

	get height() {
		return NARROW.matches ? 48 : 32;
	}

	show(selection) {
		this.selection = selection;
		this.cursor = Math.min(this.cursor, Math.max(this.lines.length - 1, 0));
		this.draw();
	}

	draw() {
		if (!this.selection || !this.element.isConnected) return;
		const { list, height, pool, lines } = this;
		this.space.style.height = `${lines.length * height}px`;
		list.setAttribute("aria-rowcount", lines.length + Boolean(this.heads));
		const from = Math.max(0, Math.floor(list.scrollTop / height) - BESIDE);
		const to = Math.min(lines.length, Math.ceil((list.scrollTop + list.clientHeight) / height) + BESIDE);
		this.pool = new Map();
		for (let n = from; n < to; n += 1) {
			const id = idOf(lines[n]);
			const element = pool.get(id) || h("div.line", { role: "row", id });
			pool.delete(id);
			this.pool.set(id, element);
			this.update(element, lines[n], n);
			element.style.transform = `translateY(${n * height}px)`;
			if (!element.isConnected) this.space.append(element);
		}
		for (const element of pool.values()) element.remove();
		if (lines[this.cursor]) list.setAttribute("aria-activedescendant", idOf(lines[this.cursor]));
	}

	update(element, line, n) {
		const { row, group, level, open, more } = line;
		const chosen = row?.id === this.selection.task;
		const took = row && this.selection.took(row);
		const place = ["line", `level-${level}`, n === this.cursor && "cursor", chosen && "chosen", group && (more ? "more" : "group")].filter(Boolean).join(" ");
		const face = [n, place, took, open, more, group && JSON.stringify(group.counts), this.face].join();
		if (element.row === row && element.face === face) return;
		Object.assign(element, { row, face, n, className: place });
		set(element, { "aria-rowindex": n + 1 + Boolean(this.heads), "aria-level": !this.heads && level + 1, "aria-selected": String(chosen), "aria-expanded": group && String(open) });
		replace(element, this.cellsOf(line, took).map(([name, ...content]) => h("span", { class: name, role: "gridcell", title: name === "c-note" && content[content.length - 1] }, content)));
	}

	cellsOf({ row, group, open, more }, took) {
		const { status, tokens: used, cost_usd: dollars } = row || group;
		const note = row ? noteOf(row) : more ? moreOf(more) : countsOf(group);
		return more ? [["c-state"], ["c-id", h("span.name", "…")], ["c-note", note]] : [
			["c-state", group && h("span.twist", { "aria-hidden": "true" }, open ? "▾" : "▸"), icon(status)],
			["c-id", h("span.name", row ? row.id : `${group.name}.*`), row?.item && h("span.item", row.item)],
			["c-note", row && [h("b", { status }, words(status)), " "], note],
			["c-num", row?.attempts > 1 && `${row.attempts}×`],
			["c-num", seconds(took)],
			["c-num", tokens(used)],
			["c-num", cost({ cost_usd: dollars })],
		];
	}

	open(n = this.cursor) {
		this.cursor = n;
		this.onopen(this.lines[n]);
	}

	press(event) {
		const last = this.lines.length - 1;
		const page = Math.max(1, Math.floor(this.list.clientHeight / this.height) - 1);
		const line = this.lines[this.cursor];
		const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last };
		if (event.key in moves && !event.ctrlKey && !event.metaKey) this.move(Math.min(last, Math.max(0, this.cursor + moves[event.key])));
		else if (event.key === "Enter" || event.key === " ") this.open();
		else if (event.key === "ArrowRight" && line?.open === false) this.ontoggle(line.group.name, true);
		else if (event.key === "ArrowLeft" && line?.open) this.ontoggle(line.group.name, false);
		else return;
		event.preventDefault();
	}

	move(to) {
		const { list, height } = this;
		this.cursor = to;
		list.scrollTop = Math.min(Math.max(list.scrollTop, (to + 1) * height + (this.heads?.offsetHeight || 0) - list.clientHeight), to * height);
		this.draw();
	}

	reveal(task) {
		const n = this.lines.findIndex((line) => line.row?.id === task);
		if (n >= 0) this.move(n);
	}
}

const idOf = ({ row, group, more }) => `line-${row ? row.id : `*${group.name}${more ? "*" : ""}`}`;
