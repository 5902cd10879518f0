// Elements from plain values. Text becomes a text node and never markup: it comes from models and functions.

const SVG = "http://www.w3.org/2000/svg";
// Escape sequences of terminals: CSI, OSC and the like. No part of a pattern runs over a character with which it begins:
// the time grows with the text alone.
const SEQUENCES = /\u001b\[[0-?]*[ -/]*[@-~]|[\u001b\u009d][\]PX^_]?[^\u0007\u001b\u009c\u009d]*(?:\u0007|\u001b\\|\u009c)|\u001b[ -/]*[0-~]?/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const DISGUISES = /[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]/g;
const URLS = /(https?:\/\/[^\s<>"'`\u0000-\u001f]+[^\s<>"'`.,;:!?)\]}])/g;

/** Return `text` without escape sequences and control characters; marks that reorder text are written out. */
export const clean = (text) =>
	String(text)
		.replace(/\r\n?/g, "\n")
		.replace(SEQUENCES, "")
		.replace(CONTROLS, "")
		.replace(DISGUISES, (mark) => "\\u" + mark.codePointAt(0).toString(16));

/**
 * Return an element: `h("p.note.wide", { id: "x" }, "text", …)`. A plain object behind the name holds attributes; names
 * that begin with `on` are listeners, `label` is the name for screen readers, and `status` is the colour of a status.
 */
export function h(name, ...children) {
	const [tag, ...classes] = name.split(".");
	const element = document.createElement(tag);
	if (classes.length) element.className = classes.join(" ");
	return fill(element, children);
}

export const s = (tag, ...children) => fill(document.createElementNS(SVG, tag), children);

export function set(element, attributes) {
	for (const [name, value] of Object.entries(attributes)) {
		if ((value ?? false) === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "value") element.value = value;
		else if (name === "status") element.style.color = `var(--${value}, var(--muted))`;
		else element.setAttribute(name === "label" ? "aria-label" : name, value === true ? "" : clean(value));
	}
}

function fill(element, children) {
	if (children[0]?.constructor === Object) set(element, children.shift());
	for (const child of children.flat(Infinity))
		if (child instanceof Node) element.append(child);
		else if (child || child === 0) element.append(document.createTextNode(clean(child)));
	return element;
}

export function replace(element, ...children) {
	element.replaceChildren();
	return fill(element, children);
}

export const linked = (text) =>
	clean(text).split(URLS).map((part, n) => (n % 2 && URL.canParse(part) ? h("a", { href: part, target: "_blank", rel: "noopener noreferrer" }, part) : part));

/** The shapes of statuses: no colour is needed to tell them apart. */
export const SHAPES = {
	completed: "✓", skipped: "»", running: "▸", waiting_input: "?", failed: "✕", cancelled: "⊘", pending: "○", queued: "○", cancelling: "⊖", interrupted: "!", parked: "◷",
};

export const fact = (text) => text && h("span", text);

export const icon = (status) => h("span.icon", { status, "aria-hidden": "true", "data-shape": SHAPES[status] });

export const status = (value) => h("span.status", { status: value }, icon(value), " ", words(value));

export const button = (text, onclick, given) => h("button", { type: "button", onclick, ...given }, text);

/** Return buttons that choose statuses; `onchange` receives the chosen ones. */
export const chips = (statuses, chosen, onchange, counts) =>
	statuses.map((name) => {
		const toggle = () => onchange(chosen.has(name) ? [...chosen].filter((one) => one !== name) : [...chosen, name]);
		return button([icon(name), " ", words(name), counts && ` ${count(counts[name] || 0)}`], toggle, { class: "chip", "aria-pressed": String(chosen.has(name)) });
	});

export const table = (titles, rows) =>
	h("div.scroll", h("table",
		h("thead", h("tr", titles.map((title) => h("th", title)))),
		h("tbody", rows.map((cells) => h("tr", cells.map((one) => h("td", one)))))));

export const zoomButtons = (scale) =>
	h("div.zoom", [["−", 1 / 1.5, "Zoom out"], ["fit", 0], ["+", 1.5, "Zoom in"]].map(([text, by, label]) => button(text, () => scale(by), { label })));

// Numbers, times and addresses for people.
export const count = (number) => number.toLocaleString("en-US");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The statuses of a run that no process runs. */
export const RESUMABLE = ["interrupted", "parked", "waiting_input", "queued"];

export const words = (status) => status.replace("_", " ");

export const spelled = (value) => (typeof value === "string" ? value : JSON.stringify(value));

export const json = (value) => JSON.stringify(value, null, 2);

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
export const tokens = (number) => (number ? COMPACT.format(number).replace("K", "k") : "");

export const inOut = (one) => one.input_tokens + one.output_tokens > 0 && `${tokens(one.input_tokens)} in, ${tokens(one.output_tokens)} out`;

/** "≥" marks a sum with unknown parts. */
export function cost({ cost_usd: dollars, cost_is_partial: partial }) {
	if ((dollars ?? null) === null) return partial ? "cost unknown" : "";
	return (partial ? "≥ $" : "$") + (dollars === 0 || dollars >= 0.095 ? dollars.toFixed(2) : Number(dollars.toPrecision(2)));
}

/** 40 ms, 1.2 s, 12 s, 3 min 05 s, 2 h 10 min, 3 d 04 h. */
export function seconds(value) {
	if (Number.isNaN(value ?? NaN)) return "";
	if (value < 1) return `${Math.round(Math.max(value, 0) * 1000)} ms`;
	if (value < 10) return `${value.toFixed(1)} s`;
	const whole = Math.round(value);
	if (whole < 60) return `${whole} s`;
	const [large, name, small, rest] = whole < 3600 ? [60, "min", 1, "s"] : whole < 172_800 ? [3600, "h", 60, "min"] : [86_400, "d", 3600, "h"];
	return `${Math.floor(whole / large)} ${name} ${String(Math.floor((whole % large) / small)).padStart(2, "0")} ${rest}`;
}

export const time = (at) => (at ? Date.parse(at) : NaN);

export function clock(at) {
	if (!at) return "";
	const moment = new Date(at);
	const day = moment.toDateString() === new Date().toDateString() ? "" : `${moment.toLocaleDateString([], { day: "numeric", month: "short" })} `;
	return day + moment.toLocaleTimeString([], { hour12: false });
}

export const elapsed = (run) => seconds(((time(run.ended_at) || Date.now()) - time(run.started_at)) / 1000);

export const addressOf = (run, task) => `#/run/${encodeURIComponent(run)}${task ? `/task/${encodeURIComponent(task)}` : ""}`;

export function progress(run) {
	const shown = Object.keys(SHAPES).filter((name) => run.counts[name]);
	const told = shown.map((name) => `${count(run.counts[name])} ${words(name)}`).join(", ");
	const parts = shown.map((name) => h(`span.${name}`, { status: name }));
	parts.forEach((part, n) => (part.style.flexGrow = run.counts[shown[n]]));
	return h("span.bar", { role: "img", label: told, title: told }, parts);
}

export const owner = (run) => run.owner && `process ${run.owner.pid} on ${run.owner.host}`;
