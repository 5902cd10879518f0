// The timeline: a canvas with a bar for each attempt, and a thin line for each wait. The list has the same lines for
// keyboards and screen readers.

import { button, h, replace } from "./dom.js";
import { clock, cut, plural, seconds, time, words } from "./format.js";
import { noteOf } from "./selection.js";

const [LINE, HEAD, EDGE] = [22, 24, 16];
const REDRAW_MS = 500;
const SHORTEST = 2; // pixels; shorter bars run together
/** What is drawn, from the back to the front: the colour, the least width in pixels, and the opacity. */
const BARS = {
	wait: ["muted", 0, 0.4],
	question: ["waiting_input", 0],
	completed: ["completed", 1],
	skipped: ["skipped", 2],
	cancelled: ["cancelled", 2],
	interrupted: ["interrupted", 2, 0.55],
	retried: ["failed", 2, 0.55],
	asked: ["waiting_input", 3],
	running: ["running", 3],
	failed: ["failed", 3],
};
const LOOK = ["text", "line", "chosen", "back", "pending", ...Object.values(BARS).map(([name]) => name)];
const STEPS = [0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];

/** Return the attempts of a task as `[status, start, end]`, without an end while under way. */
const attemptsOf = (row) => row.tries || (row.start === undefined ? [] : [[row.status, row.start, row.end]]);

export class Timeline {
	zoom = 1;
	canvas = h("canvas", { "aria-hidden": "true" });
	pen = this.canvas.getContext("2d");
	space = h("div");
	tip = h("div.tip", { hidden: true });

	constructor(onpick, ontoggle) {
		Object.assign(this, { onpick, ontoggle });
		this.scroll = h("div.scroller", {
			tabindex: 0, role: "group", label: "Timeline; the list shows the same tasks",
			onkeydown: (event) => this.press(event), onscroll: () => this.later(), onclick: (event) => this.pick(this.lineAt(event)),
			onpointermove: (event) => this.point(event),
		}, this.space);
		this.element = h("div.timeline", this.canvas, this.scroll, this.tip, zoomButtons((by) => this.scale(by)));
		new ResizeObserver(() => this.later()).observe(this.scroll);
	}

	show(selection, run) {
		Object.assign(this, { selection, run });
		this.later();
	}

	later() {
		this.frame ||= requestAnimationFrame(() => {
			this.frame = null;
			this.draw();
		});
	}

	/** Find the present, or the last moment of a run that no process runs; after a change also the first moment. */
	gather() {
		const { selection, run } = this;
		if (this.version !== selection.version) {
			this.version = selection.version;
			this.bars = new Map();
			this.started = time(run?.started_at) - selection.origin;
			this.first = this.started || Infinity;
			this.last = -Infinity;
			for (const row of selection.all)
				for (const [, start, end] of attemptsOf(row)) {
					this.first = Math.min(this.first, start);
					this.last = Math.max(this.last, end ?? start);
				}
		}
		const isLive = run?.status === "running" || run?.status === "cancelling";
		this.now = isLive ? selection.now : this.last;
		return isLive;
	}

	/** Return what a line shows, by the starts; for a task its waits, too. */
	barsOf({ row, group }) {
		if (group) {
			if (!this.bars.has(group)) this.bars.set(group, group.parts.flatMap(attemptsOf).sort((one, other) => one[1] - other[1]));
			return this.bars.get(group);
		}
		const bars = [];
		let since = this.started;
		let wait = "wait";
		for (const position of row.deps || []) since = Math.max(since, this.selection.all[position]?.end ?? Infinity);
		for (const attempt of attemptsOf(row)) {
			bars.push([wait, since, attempt[1]], attempt);
			since = attempt[2];
			wait = attempt[0] === "asked" ? "question" : "wait";
		}
		if (row.status === "pending" || row.status === "waiting_input") bars.push([wait, since, this.now]);
		return bars;
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
		const isLive = this.gather();
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
		for (const [line, y] of places) this.drawBars(this.barsOf(line), y, look);
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

	drawName({ row, group, level, open }, y, look) {
		const { pen } = this;
		pen.fillStyle = look.chosen;
		if (row && row.id === this.selection.task) pen.fillRect(0, y, this.width, LINE);
		pen.fillStyle = look[(row || group).status];
		pen.fillRect(6, y + 6, 3, LINE - 12);
		pen.fillStyle = look.text;
		const left = 14 + level * 10;
		pen.fillText(cut(row ? row.id : `${open ? "▾" : "▸"} ${group.name}.*`, this.gutter - left - 8, 7.3), left, y + LINE / 2);
	}

	/** Draw bars, given by their starts. Short ones run together; failed and running ones keep a least width. */
	drawBars(bars, y, look) {
		const { pen, width, gutter, now } = this;
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
		for (const [status, [colour, least, alpha = 1]] of Object.entries(BARS))
			for (const [from, to] of found[status] || []) {
				const wide = Math.max(to - from, least);
				pen.fillStyle = look[colour];
				pen.globalAlpha = alpha;
				if (!least) pen.fillRect(from, y + LINE / 2, wide, 1);
				else pen.fillRect(wide > to - from ? Math.round(from) : from, y + 5, wide, LINE - 10); // between two pixels, a short bar would be pale
				pen.fillStyle = look.back;
				if (status === "failed" && wide > 12) pen.fillText("✕", from + 2, y + LINE / 2);
			}
		pen.globalAlpha = 1;
	}

	readLook() {
		const found = getComputedStyle(this.canvas);
		const colour = (name) => ((this.canvas.style.color = `var(--${name})`), found.color);
		return { font: found.fontFamily, mono: found.getPropertyValue("--mono"), ...Object.fromEntries(LOOK.map((name) => [name, colour(name)])) };
	}

	lineAt(event) {
		const y = event.clientY - this.scroll.getBoundingClientRect().top - HEAD;
		return y < 0 ? null : this.selection?.lines[Math.floor((y + this.scroll.scrollTop) / LINE)];
	}

	point(event) {
		const { row, group } = this.lineAt(event) || {};
		this.tip.hidden = !row && !group;
		if (this.tip.hidden) return;
		const x = event.clientX - this.scroll.getBoundingClientRect().left;
		const bars = (row ? attemptsOf(row) : []).map((one, n) => [n + 1, ...one]);
		const [attempt, status, start, end = this.now] = bars.find(([, , from, to]) => x >= this.x(from) - 3 && x <= this.x(to ?? this.now) + 3) || [];
		replace(this.tip, h("b", row ? row.id : `${group.name}.*`), ": ", row ? words(row.status) : plural(group.parts.length, "part"),
			attempt && h("div", `attempt ${attempt} ${status}, ${clock(start + this.selection.origin)}, ${seconds((end - start) / 1000)}`),
			row && h("div.about", noteOf(row)));
	}

	pick(line) {
		if (line?.row) this.onpick(line.row.id);
		else if (line) this.ontoggle(line.group.name);
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
		this.pick(lines[n]);
		const [top, high] = [n * LINE - this.scroll.scrollTop, this.scroll.clientHeight];
		if (top < 0 || top > high - 2 * LINE) this.scroll.scrollTop += top - high / 2;
	}
}

/** Return the buttons that zoom a picture by a factor; 0 fits the picture into the view. */
export const zoomButtons = (scale) =>
	h("div.zoom", button("−", () => scale(1 / 1.5), { label: "Zoom out" }), button("fit", () => scale(0)), button("+", () => scale(1.5), { label: "Zoom in" }));
