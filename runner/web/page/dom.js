// Elements from plain values. Text becomes a text node and never markup: it comes from models and functions.

import { count, words } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
// Escape sequences of terminals: CSI, OSC and the like, then any other control character but tab and newline.
const SEQUENCES = /\u001b\[[0-?]*[ -/]*[@-~]|[\u001b\u009d][\]PX^_]?[^\u0007\u001b\u009c]*(?:\u0007|\u001b\\|\u009c)|\u001b[ -/]*[0-~]?/g;
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
 * that begin with `on` are listeners, and `status` is the colour of a status.
 */
export function h(name, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  return fill(element, children);
}

/** Return an element of SVG. */
export const s = (tag, ...children) => fill(document.createElementNS(SVG, tag), children);

function fill(element, children) {
  if (children[0]?.constructor === Object)
    for (const [name, value] of Object.entries(children.shift())) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "value") element.value = value;
      else if (name === "status") element.style.color = `var(--${value})`;
      else element.setAttribute(name, value === true ? "" : clean(value));
    }
  for (const child of children.flat(Infinity))
    if (child instanceof Node) element.append(child);
    else if (child || child === 0) element.append(document.createTextNode(clean(child)));
  return element;
}

/** Replace the children of `element`. */
export function replace(element, ...children) {
  element.replaceChildren();
  return fill(element, children);
}

/** Return text with a link for each address of http or https. */
export const linked = (text) =>
  clean(text).split(URLS).map((part, n) => (n % 2 && URL.canParse(part) ? h("a", { href: part, target: "_blank", rel: "noopener noreferrer" }, part) : part));

const RING = "M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11";
const SHAPES = {
  running: `${RING}M6.8 5.8l3.2 2.2l-3.2 2.2z`,
  waiting_input: "M4.5 6a3.5 3.5 0 1 1 5 3.2c-1 .5-1.5 1-1.5 2M8 13.6v.4",
  completed: "M2.5 8.5l3.5 3.5l7.5 -8",
  failed: "M3.5 3.5l9 9M12.5 3.5l-9 9",
  skipped: "M3 4l4 4l-4 4M9 4l4 4l-4 4",
  cancelled: `${RING}M4.2 4.2l7.6 7.6`,
  cancelling: `${RING}M5 8h6`,
  interrupted: "M8 2v7.5M8 13v.6",
};

/** Return the shape of a status: each status has its own, so no colour is needed to tell them apart. */
export const icon = (status) =>
  s("svg", { class: `icon ${status}`, viewBox: "0 0 16 16", "aria-hidden": "true", status }, s("path", { d: SHAPES[status] || RING }));

/** Return the shape and the word of a status. */
export const status = (value) => h("span.status", { status: value }, icon(value), words(value));

export const button = (text, onclick, given) => h("button", { type: "button", onclick, ...given }, text);

/** Return buttons that choose statuses, with the number of each if given; `onchange` receives the chosen ones. */
export const chips = (statuses, chosen, onchange, counts) =>
  statuses.map((name) => {
    const toggle = () => onchange(chosen.has(name) ? [...chosen].filter((one) => one !== name) : [...chosen, name]);
    return button([icon(name), words(name), counts && ` ${count(counts[name] || 0)}`], toggle, { class: "chip", "aria-pressed": String(chosen.has(name)) });
  });

/** Return a table: `rows` are lists of cells, each a content or an element `td`. */
export const table = (titles, rows) =>
  h("div.scroll", h("table",
    h("thead", h("tr", titles.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", rows.map((cells) => h("tr", cells.map((one) => (one?.tagName === "TD" ? one : h("td", one))))))));
