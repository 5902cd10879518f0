// The tasks of a run: the selection that all views show (filter, groups, task), and the views: a table and a timeline, in
// lines below a head, and the graph. Only what is in view is an element, so ten thousand tasks scroll quickly.

import { addressOf, button, clock, cost, count, h, icon, plural, replace, s, seconds, set, SHAPES, time, tokens, words, zoomButtons } from "./dom.js";
import { download, get } from "./page_api.js";

const BESIDE = 12; // lines above and below the view
const FOLDED_FROM = 11;
/** The most urgent first: the first that a group has is its status. */
export const STATUSES = ["failed", "waiting_input", "running", "pending", "cancelled", "skipped", "completed"];

class Group {
	parts = [];
	counts = {};
	tokens = 0;

	constructor(name) {
		this.name = name;
	}

	add(row) {
		this.parts.push(row);
		this.counts[row.status] = (this.counts[row.status] || 0) + 1;
		this.tokens += row.tokens || 0;
		if (row.cost_usd !== undefined) this.cost_usd = (this.cost_usd || 0) + row.cost_usd;
	}

	get status() {
		return STATUSES.find((status) => this.counts[status]);
	}
}

function groupsOf(rows) {
	const groups = new Map();
	for (const row of rows) {
		if (!row.group) continue;
		if (!groups.has(row.group)) groups.set(row.group, new Group(row.group));
		groups.get(row.group).add(row);
	}
	return groups;
}

export class Selection {
	all = []; // rows by position
	rows = new Map(); // rows by id
	statuses = new Set();
	find = "";
	task = null;
	opened = new Map(); // whether a person has opened or folded a group, by its name
	origin = NaN; // the creation of the run; times of rows are milliseconds since then

	merge(rows) {
		for (const row of rows) {
			this.all[row.position] = row;
			this.rows.set(row.id, row);
		}
	}

	get now() {
		return Date.now() - this.origin;
	}

	took({ status, start, took }) {
		return status === "running" ? Math.floor((this.now - start) / 1000) : took / 1000;
	}

	get filtered() {
		return this.statuses.size > 0 || this.find !== "";
	}

	fits(row) {
		const isChosen = !this.statuses.size || this.statuses.has(row.status);
		return isChosen && `${row.id}\n${row.item || ""}\n${this.find && row.answer ? JSON.stringify(row.answer) : ""}`.toLowerCase().includes(this.find);
	}

	isOpen(group) {
		return this.opened.get(group.name) ?? (this.filtered || group.parts.length < FOLDED_FROM);
	}

	toggle(name, open) {
		this.opened.set(name, open ?? !this.isOpen(this.groups.get(name)));
		this.lay();
	}

	/** Lay the fitting tasks out in lines. */
	lay() {
		this.counts = {};
		for (const row of this.all) this.counts[row.status] = (this.counts[row.status] || 0) + 1;
		this.fitting = this.filtered ? this.all.filter((row) => this.fits(row)) : this.all;
		this.groups = groupsOf(this.fitting);
		this.lines = [];
		const placed = new Set();
		for (const row of this.fitting) {
			const group = this.groups.get(row.group || row.id);
			const isPlaced = group && placed.has(group.name);
			if (!row.group && !isPlaced) this.lines.push({ row, level: 0 });
			if (!group || isPlaced) continue;
			placed.add(group.name);
			const open = this.isOpen(group);
			this.lines.push({ group, open, level: 0 });
			if (open) for (const part of group.parts) this.lines.push({ row: part, level: 1 });
		}
	}
}

/** The error or question of a task, and the reason for which it waits. */
const noteOf = ({ note, wait }) => [note, wait].filter(Boolean).join("; ");

const countsOf = ({ parts, counts }) =>
	`${plural(parts.length, "part")}: ${Object.entries(counts).map(([status, number]) => `${count(number)} ${words(status)}`).join(", ")}`;

/** `cellsOf` of a subclass returns the cells of a line: class, content, title. */
class TaskList {
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

// All tasks, or the parts of a `for_each`, as a table: item, answer, status, time, tokens, cost.

const { compare } = new Intl.Collator("en", { numeric: true });
const FEW = 10; // parts that are shown among all tasks
const MOST_FIELDS = 12; // columns of a structured answer
const SAMPLE = 500; // parts whose answers name the columns
const isFields = (answer) => answer?.constructor === Object;
const cell = (value) => (value === undefined || value === null ? "" : String(value));

export class ResultTable extends TaskList {
	bar = h("div.facts");
	told = h("span");

	constructor(run, onopen) {
		super("grid", "Results", onopen);
		this.run = run;
		this.element = h("div.results", this.bar, this.list);
	}

	show(selection) {
		const groups = [...selection.groups.values()].sort((one, other) => other.parts.length - one.parts.length);
		const many = groups[0]?.parts.length;
		if (many > FEW && 2 * many >= selection.all.length) this.largest ||= groups[0].name;
		const name = this.chosen ?? this.largest ?? "";
		const parts = name ? selection.groups.get(name)?.parts || [] : selection.fitting;
		const fields = new Set();
		for (const { answer } of name || !groups.length ? parts.slice(0, SAMPLE) : []) if (isFields(answer) && fields.size < MOST_FIELDS) for (const field of Object.keys(answer)) fields.add(field);
		const answers = fields.size
			? [...fields].map((field) => [field, ({ answer }) => (isFields(answer) ? answer[field] : undefined)])
			: [["Answer", ({ answer }) => (isFields(answer) ? Object.entries(answer).map((pair) => pair.map(cell).join(": ")).join(", ") : answer)]];
		this.columns = [
			[name ? "Item" : "Task", ({ item, id }) => (name && item) || id], ...answers,
			["Status", ({ status }) => STATUSES.indexOf(status)], ["Time", (row) => selection.took(row)],
			["Tokens", (row) => row.tokens], ["Cost", (row) => row.cost_usd],
		];
		this.count = answers.length;
		replace(this.told, selection.groups.has(name) && countsOf(selection.groups.get(name)));
		const face = JSON.stringify([this.columns.map(([title]) => title), this.by, this.down, name, groups.map((one) => one.name)]);
		if (face !== this.face) {
			Object.assign(this, { face, name });
			this.drawHeads(selection, groups);
		}
		super.show(selection, null, this.sorted(parts).map((row) => (row.line ||= { row, level: 0 })));
	}

	sorted(parts) {
		const [, value] = this.columns.find(([title]) => title === this.by) || [];
		if (!value) return parts;
		const isNone = (one) => one === undefined || one === null || Number.isNaN(one);
		const order = (one, other) => isNone(one) - isNone(other) || (isNone(one) ? 0 : (this.down ? -1 : 1) * (typeof one === "number" && typeof other === "number" ? one - other : compare(one, other)));
		return parts.map((row) => [value(row), row]).sort(([one], [other]) => order(one, other)).map(([, row]) => row);
	}

	drawHeads(selection, groups) {
		const isFocused = [...this.heads.children].findIndex((one) => one.contains(document.activeElement));
		const columns = `minmax(120px, 2fr) repeat(${this.count}, minmax(90px, ${Math.max(1, 4 / this.count)}fr)) 120px 70px 60px 76px`;
		this.list.style.setProperty("--columns", columns);
		this.list.style.setProperty("--least", `${450 + 98 * this.count}px`);
		replace(this.heads, this.columns.map(([title]) =>
			h("span", { role: "columnheader", "aria-sort": title !== this.by ? "none" : this.down ? "descending" : "ascending" },
				button([title, title === this.by && (this.down ? " ▾" : " ▴")], () => this.sort(title), { class: "quiet" }))));
		this.heads.children[isFocused]?.firstChild.focus();
		const save = (format) => () => {
			const query = new URLSearchParams({ format, ...(this.name && { group: this.name }) });
			return download(`/page/runs/${encodeURIComponent(this.run)}/rows?${query}`, `${this.name || "tasks"}.${format}`);
		};
		replace(this.bar,
			(groups.length > 0 || this.name) && h("select", { label: "Table", onchange: ({ target }) => (this.chosen = target.value, this.show(selection)) },
				[...new Set(["", this.name, ...groups.map(({ name }) => name)])].map((name) => h("option", { value: name, selected: name === this.name }, name || "all tasks"))),
			button("Download CSV", save("csv")), button("JSON Lines", save("jsonl")), this.told);
	}

	sort(title) {
		this.down = this.by === title && !this.down;
		this.by = title;
		this.show(this.selection);
	}

	cellsOf({ row }, took) {
		const texts = this.columns.slice(1, -4).map(([, value]) => cell(value(row)));
		if (!isFields(row.answer)) texts[0] = cell(row.answer) || noteOf(row);
		return [["c-id", [h("span.name", (this.name && row.item) || row.id), !this.name && row.item && h("span.item", row.item)]], ...texts.map((text) => ["c-note", text, text]), ["c-state", [icon(row.status), " ", words(row.status), row.attempts > 1 && ` ${row.attempts}×`]],
			["c-num", seconds(took)], ["c-num", tokens(row.tokens)], ["c-num", cost(row)]];
	}
}

// The timeline: the list with a bar for each attempt, and a thin line while a task waits.

const EDGE = 16; // pixels beside the last moment
const MOST_TOLD = 9; // attempts of a line that are told in words
const SHORTEST = 2; // pixels; shorter bars run together
/** The attempts from the back to the front, with the least width in pixels. */
const BARS = { completed: 1, skipped: 2, cancelled: 2, interrupted: 2, retried: 2, asked: 3, running: 3, failed: 3 };
const COLOURS = { retried: "failed", asked: "waiting_input" };
const STEPS = [0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];

/** Return the attempts of a task, `[status, start, end]`, without an end while under way. A row has more than one alone. */
const attemptsOf = ({ bars, status, start, took }) => bars || (start === undefined ? [] : [[status, start, status === "running" ? null : start + (took || 0)]]);

export class Timeline extends TaskList {
	zoom = 1;
	height = 24;

	constructor(onopen, ontoggle) {
		super("treegrid", "Timeline", onopen, ontoggle);
		this.element = h("div.results.timeline", this.list, zoomButtons((by) => this.scale(by)));
	}

	show(selection, run) {
		this.bars = new Map();
		this.first = time(run?.started_at) - selection.origin;
		const isLive = ["running", "cancelling"].includes(run?.status);
		this.last = isLive ? null : selection.all.flatMap(attemptsOf).reduce((last, [, start, end]) => Math.max(last, end ?? start), this.first);
		super.show(selection);
	}

	scale(by) {
		const { list } = this;
		const middle = (list.clientWidth - this.gutter) / 2;
		const moment = (list.scrollLeft + middle) / this.zoom;
		this.zoom = by ? Math.min(Math.max(this.zoom * by, 1), 5000) : 1;
		this.draw();
		list.scrollLeft = moment * this.zoom - middle;
	}

	x(at) {
		return (at - this.first) * this.perMs;
	}

	draw() {
		const { selection, list } = this;
		if (!selection || !list.isConnected) return;
		const width = list.clientWidth;
		this.gutter = width < 560 ? 96 : 180;
		this.now = this.last ?? Math.ceil(selection.now / 1000) * 1000; // all lines change with it
		const wide = Math.max(width - this.gutter - EDGE, 50) * this.zoom;
		this.perMs = wide / Math.max(this.now - this.first, 1);
		this.from = list.scrollLeft;
		this.to = this.from + width - this.gutter;
		this.face = [this.now, this.perMs, this.from, width].join();
		const step = 1000 * (STEPS.find((one) => one * 1000 * this.perMs > 80) || 86_400 * Math.ceil(80 / (86_400_000 * this.perMs)));
		const styles = { columns: `${this.gutter}px ${wide + EDGE}px`, least: `${this.gutter + wide + EDGE}px`, gutter: `${this.gutter}px`, step: `${step * this.perMs}px` };
		for (const [name, value] of Object.entries(styles)) list.style.setProperty(`--${name}`, value);
		const times = [];
		for (let at = Math.ceil(this.from / this.perMs / step) * step; at * this.perMs < this.to - 40; at += step) times.push(placed(h("span.time", seconds(at / 1000).replace(".0 s", " s")), at * this.perMs));
		replace(this.heads, h("span.c-id", { role: "columnheader" }, "Task"), h("span.track", { role: "columnheader", label: "Attempts" }, times));
		super.draw();
	}

	cellsOf({ row, group, open }) {
		const told = row ? [`${row.id}: ${words(row.status)}`, ...attemptsOf(row).map((bar, n) => this.say(bar, n)).slice(-MOST_TOLD), noteOf(row)] : [countsOf(group)];
		return [["c-id", row ? row.id : `${open ? "▾" : "▸"} ${group.name}.*`], ["track", this.track(row, group), told.filter(Boolean).join("\n")]];
	}

	/** Return an attempt in words: `attempt 2 failed · 12:03:05 · 1.2 s`. */
	say([status, start, end], n) {
		return [`attempt ${n + 1} ${words(status)}`, clock(start + this.selection.origin), seconds(((end ?? this.now) - start) / 1000)].join(" · ");
	}

	/** Return the bars in view. Short ones run together; failed and running ones keep a least width. The line before is a wait. */
	track(row, group) {
		if (group && !this.bars.has(group)) this.bars.set(group, group.parts.flatMap(attemptsOf).sort((one, other) => one[1] - other[1]));
		const bars = row ? attemptsOf(row) : this.bars.get(group);
		const found = {};
		for (const [status, start, end] of bars) {
			const [from, to] = [this.x(start), this.x(end ?? this.now)];
			if (!(to >= this.from && from <= this.to)) continue;
			const runs = (found[status] ||= []);
			const last = runs.at(-1);
			const isShort = last && (to - from < SHORTEST || last[1] - last[0] < SHORTEST);
			if (last && (from < last[1] || (isShort && from < last[1] + 1))) last[1] = Math.max(last[1], to);
			else runs.push([from, to]);
		}
		const waited = row && placed(h("span.wait"), 0, this.x(row.wait ? this.now : bars.at(-1)?.[1] ?? this.first));
		return [waited, Object.entries(BARS).map(([status, least]) => (found[status] || []).map(([from, to]) =>
			placed(h(`span.attempt.${status}`, { status: COLOURS[status] || status }, status === "failed" && to - from > 12 && h("b", "✕")), from, Math.max(to - from, least))))];
	}
}

function placed(element, left, width) {
	element.style.left = `${left}px`;
	if (width !== undefined) element.style.width = `${width}px`;
	return element;
}

// The graph: boxes and curves at the places that the server computes.

const MARGIN = 24;
const AROUND = 200; // pixels beside the view
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
			const isInView = box.x < left + wide + AROUND && box.x + box.width > left - AROUND && box.y < top + high + AROUND && box.y + box.height > top - AROUND;
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
