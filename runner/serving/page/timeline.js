// The timeline: a canvas with a bar for each attempt, and a line while a task waits. Screen readers read the list in its place.

import { clock, count, cut, h, Picture, replace, seconds, set, time, words } from "./dom.js";
import { countsOf, moreOf, noteOf } from "./selection.js";

const [LINE, HEAD, EDGE] = [22, 24, 16];
const REDRAW_MS = 500;
const MOST_TOLD = 9; // bars of a line that are told in words
const SHORTEST = 2; // pixels; shorter bars run together
/** The attempts from the back to the front: the least width in pixels, the opacity, and the colour. */
const BARS = {
	completed: [1],
	skipped: [2],
	cancelled: [2],
	interrupted: [2, 0.55],
	retried: [2, 0.55, "failed"],
	asked: [3, 1, "waiting_input"],
	running: [3],
	failed: [3],
};
const LOOK = ["text", "line", "chosen", "back", "pending", "muted", "waiting_input", ...Object.keys(BARS)];
const STEPS = [0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];

/** Return the attempts of a task, `[status, start, end]`, without an end while under way. A row has more than one alone. */
const attemptsOf = ({ bars, status, start, took }) => bars || (start === undefined ? [] : [[status, start, status === "running" ? null : start + (took || 0)]]);

export class Timeline extends Picture {
	canvas = h("canvas", { "aria-hidden": "true" });
	pen = this.canvas.getContext("2d");
	space = h("div");
	tip = h("div.tip", { hidden: true, role: "status" });

	constructor(onopen) {
		super();
		this.onopen = onopen;
		this.scroll = h("div.scroller", {
			tabindex: 0, role: "group", label: "Timeline; the list shows the same tasks",
			onkeydown: (event) => this.press(event), onclick: (event) => onopen(this.lineAt(event)),
			onpointermove: (event) => this.point(event), onpointerleave: () => this.tell(), onblur: () => this.tell(),
		}, this.space);
		this.element = h("div.timeline", h("div.plot", this.canvas, this.scroll), this.tip, this.zoomed());
	}

	show(selection, run) {
		Object.assign(this, { selection, run, bars: new Map() });
		this.first = time(run?.started_at) - selection.origin;
		const ends = selection.all.flatMap(attemptsOf).map(([, start, end]) => end ?? start);
		this.last = ends.reduce((one, other) => Math.max(one, other), this.first);
		this.later();
	}

	/** Return the attempts that a line shows, by their starts. */
	barsOf({ row, group, more }) {
		if (row || more) return row ? attemptsOf(row) : [];
		if (!this.bars.has(group)) this.bars.set(group, group.parts.flatMap(attemptsOf).sort((one, other) => one[1] - other[1]));
		return this.bars.get(group);
	}

	scale(by) {
		const left = this.width / 2 - this.gutter;
		const moment = (this.scroll.scrollLeft + left) / this.zoom;
		this.zoom = by ? Math.min(Math.max(this.zoom * by, 1), 5000) : 1;
		this.draw();
		this.scroll.scrollLeft = moment * this.zoom - left;
	}

	x(at) {
		return this.left + (at - this.first) * this.perMs;
	}

	draw() {
		const { selection, scroll, canvas, pen } = this;
		if (!selection || !scroll.isConnected) return;
		const isLive = ["running", "cancelling"].includes(this.run?.status);
		this.now = isLive ? selection.now : this.last; // the last moment of a run that no process runs
		const [width, height, ratio] = [scroll.clientWidth, scroll.clientHeight, devicePixelRatio];
		this.width = width;
		this.gutter = width < 560 ? 96 : 180;
		const wide = Math.max(width - this.gutter - EDGE, 50) * this.zoom;
		this.perMs = wide / Math.max(this.now - this.first, 1);
		this.space.style.width = `${wide + this.gutter + EDGE}px`;
		this.space.style.height = `${selection.lines.length * LINE + HEAD}px`;
		this.left = this.gutter - scroll.scrollLeft;
		canvas.width = width * ratio; // also clears the canvas
		canvas.height = height * ratio;
		pen.scale(ratio, ratio);
		pen.textBaseline = "middle";
		const look = this.readLook();
		this.drawAxis(look, height);
		pen.font = `12px ${look.mono}`;
		const first = Math.floor(scroll.scrollTop / LINE);
		const places = selection.lines.slice(first, first + Math.ceil(height / LINE) + 1).map((line, n) => [line, HEAD + (first + n) * LINE - scroll.scrollTop]);
		pen.rect(0, HEAD, width, height);
		pen.clip();
		for (const [line, y] of places) this.drawName(line, y, look);
		pen.beginPath();
		pen.rect(this.gutter, HEAD, width, height);
		pen.clip();
		for (const [line, y] of places) this.drawBars(line, y, look);
		clearTimeout(this.timer);
		if (isLive) this.timer = setTimeout(() => this.later(), REDRAW_MS);
	}

	drawAxis(look, height) {
		const { pen, perMs, width } = this;
		pen.font = `12px ${look.font}`;
		const step = STEPS.find((one) => one * 1000 * perMs > 80) || 86_400 * Math.ceil(80 / (86_400_000 * perMs));
		const first = Math.max(0, Math.ceil((this.gutter - this.left) / perMs / step / 1000));
		pen.fillStyle = look.line;
		pen.fillRect(0, HEAD - 1, width, 1);
		for (let at = first * step; this.x(this.first + at * 1000) < width - 40; at += step) {
			const x = Math.round(this.x(this.first + at * 1000));
			pen.fillStyle = look.line;
			pen.fillRect(x, HEAD, 1, height);
			pen.fillStyle = look.muted;
			pen.fillText(seconds(at).replace(".0 s", " s"), x + 3, HEAD / 2);
		}
	}

	drawName({ row, group, level, open, more }, y, look) {
		const { pen } = this;
		pen.fillStyle = look.chosen;
		if (row && row.id === this.selection.task) pen.fillRect(0, y, this.width, LINE);
		pen.fillStyle = look[(row || group).status];
		pen.fillRect(6, y + 6, 3, LINE - 12);
		pen.fillStyle = look.text;
		const left = 14 + level * 10;
		pen.fillText(cut(row ? row.id : more ? `and ${count(more)} more` : `${open ? "▾" : "▸"} ${group.name}.*`, this.gutter - left - 8, 7.3), left, y + LINE / 2);
	}

	/** Draw attempts. Short ones run together; failed and running ones keep a least width. The line before is a wait. */
	drawBars(line, y, look) {
		const { pen, width, gutter, now } = this;
		const bars = this.barsOf(line);
		const middle = y + LINE / 2;
		if (line.row) {
			const end = line.row.wait ? now : bars.at(-1)?.[1] ?? this.first;
			pen.fillStyle = look.muted;
			pen.fillRect(this.x(this.first), middle, (end - this.first) * this.perMs, 1);
		}
		const found = {};
		for (const [status, start, end] of bars) {
			const [from, to] = [this.x(start), this.x(end ?? now)];
			if (!(to >= gutter && from <= width)) continue;
			const drawn = (found[status] ||= []);
			const last = drawn.at(-1);
			const isShort = last && (to - from < SHORTEST || last[1] - last[0] < SHORTEST);
			if (last && (from < last[1] || (isShort && from < last[1] + 1))) last[1] = Math.max(last[1], to);
			else drawn.push([from, to]);
		}
		for (const [status, [least, alpha = 1, colour = status]] of Object.entries(BARS))
			for (const [from, to] of found[status] || []) {
				const wide = Math.max(to - from, least);
				pen.fillStyle = look[colour];
				pen.globalAlpha = alpha;
				pen.fillRect(wide > to - from ? Math.round(from) : from, y + 5, wide, LINE - 10);
				pen.fillStyle = look.back;
				if (status === "failed" && wide > 12) pen.fillText("✕", from + 2, middle);
			}
		pen.globalAlpha = 1;
	}

	readLook() {
		const found = getComputedStyle(this.canvas);
		const colour = (status) => (set(this.canvas, { status }), found.color);
		return { font: found.fontFamily, mono: found.getPropertyValue("--mono"), ...Object.fromEntries(LOOK.map((name) => [name, colour(name)])) };
	}

	lineAt(event) {
		const y = event.clientY - this.scroll.getBoundingClientRect().top - HEAD;
		return y < 0 ? null : this.selection?.lines[Math.floor((y + this.scroll.scrollTop) / LINE)];
	}

	point(event) {
		const line = this.lineAt(event);
		const x = event.clientX - this.scroll.getBoundingClientRect().left;
		this.tell(line, line?.row && this.barsOf(line).filter(([, start, end]) => x >= this.x(start) - 3 && x <= this.x(end ?? this.now) + 3));
	}

	tell(line, bars = []) {
		this.tip.hidden = !line;
		if (!line) return;
		const { row, group, more } = line;
		const told = bars.slice(-MOST_TOLD).map((bar) => this.say(row, bar));
		replace(this.tip, h("b", row ? row.id : `${group.name}.*`), ": ", row ? words(row.status) : more ? moreOf(more) : countsOf(group),
			told.map((text) => h("div", text)), row && h("div.about", noteOf(row)));
	}

	/** Return an attempt in words: `attempt 2 failed · 12:03:05 · 1.2 s`. */
	say(row, [kind, start, end]) {
		const number = attemptsOf(row).findIndex((one) => one[1] === start) + 1;
		return [`attempt ${number} ${words(kind)}`, clock(start + this.selection.origin), seconds(((end ?? this.now) - start) / 1000)].join(" · ");
	}

	press(event) {
		const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
		if (!step) return;
		event.preventDefault();
		const { lines } = this.selection;
		let n = this.selection.lineOf(this.selection.task);
		do n += step;
		while (lines[n]?.group);
		if (!lines[n]) return;
		this.onopen(lines[n]);
		this.tell(lines[n], this.barsOf(lines[n]));
		const [top, high] = [n * LINE - this.scroll.scrollTop, this.scroll.clientHeight];
		if (top < 0 || top > high - 2 * LINE) this.scroll.scrollTop += top - high / 2;
	}
}
