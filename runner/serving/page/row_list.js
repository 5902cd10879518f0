// Tasks in lines below a head: only the lines in view are elements, so ten thousand tasks scroll quickly.

import { h, replace, set } from "./dom.js";

const BESIDE = 12; // lines above and below the view

/** `cellsOf` of a subclass returns the cells of a line: class, content, title. */
export class TaskList {
	cursor = 0;
	height = 32; // pixels of a line
	pool = new Map();
	heads = h("div.heads", { role: "row", "aria-rowindex": 1 });
	space = h("div.space", { role: "presentation" });

	constructor(role, label, onopen, ontoggle) {
		Object.assign(this, { role, onopen, ontoggle });
		this.list = h("plait-tasks", {
			role, label, tabindex: "0",
			onscroll: () => this.draw(), onkeydown: (event) => this.press(event), onclick: ({ target }) => target.closest(".line")?.n >= 0 && this.open(target.closest(".line").n),
		}, this.heads, this.space);
		new ResizeObserver(() => this.draw()).observe(this.list);
	}

	show(selection, _run, lines = selection.lines) {
		Object.assign(this, { selection, lines });
		this.cursor = Math.min(this.cursor, Math.max(this.lines.length - 1, 0));
		this.draw();
	}

	draw() {
		if (!this.selection || !this.list.isConnected) return;
		const { list, height, pool, lines } = this;
		this.space.style.height = `${lines.length * height}px`;
		list.setAttribute("aria-rowcount", lines.length + 1);
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
		const { row, group, level, open } = line;
		const chosen = row?.id === this.selection.task;
		const took = row && this.selection.took(row);
		const place = ["line", `level-${level}`, n === this.cursor && "cursor", chosen && "chosen", group && "group"].filter(Boolean).join(" ");
		const face = [n, place, took, open, group && JSON.stringify(group.counts), this.face].join();
		if (element.row === row && element.face === face) return;
		Object.assign(element, { row, face, n, className: place });
		set(element, { "aria-rowindex": n + 2, "aria-level": this.role === "treegrid" && level + 1, "aria-selected": String(chosen), "aria-expanded": group && String(open) });
		replace(element, this.cellsOf(line, took).map(([name, content, title]) => h("span", { class: name, role: "gridcell", title }, content)));
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
		list.scrollTop = Math.min(Math.max(list.scrollTop, (to + 1) * height + this.heads.offsetHeight - list.clientHeight), to * height);
		this.draw();
	}

	reveal(task) {
		const n = this.lines.findIndex((line) => line.row?.id === task);
		if (n >= 0) this.move(n);
	}
}

const idOf = ({ row, group }) => `line-${row ? row.id : `*${group.name}`}`;
