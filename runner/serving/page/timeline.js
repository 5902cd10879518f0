// The timeline: the list with a bar for each attempt, and a thin line while a task waits.

import { clock, h, replace, seconds, time, words, zoomButtons } from "./dom.js";
import { TaskList } from "./row_list.js";
import { countsOf, noteOf } from "./selection.js";

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
