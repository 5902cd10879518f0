// Elements from plain values. Text becomes a text node and never markup: it comes from models and functions.

import { count, words } from "./format.js";

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
	running: "▸", waiting_input: "?", completed: "✓", failed: "✕", skipped: "»", cancelled: "⊘", cancelling: "⊖", interrupted: "!",
};

export const icon = (status) => h("span.icon", { status, "aria-hidden": "true", "data-shape": SHAPES[status] || "○" });

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

/** A view that is drawn in the next frame, also if `scroll` is moved or resized, with buttons that `scale` it. */
export class Picture {
	zoom = 1;

	zoomed() {
		this.scroll.addEventListener("scroll", () => this.later());
		new ResizeObserver(() => this.later()).observe(this.scroll);
		return h("div.zoom", [["−", 1 / 1.5, "Zoom out"], ["fit", 0], ["+", 1.5, "Zoom in"]].map(([text, by, label]) => button(text, () => this.scale(by), { label })));
	}

	later() {
		this.frame ||= requestAnimationFrame(() => {
			this.frame = null;
			this.draw();
		});
	}
}
