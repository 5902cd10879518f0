// Elements from plain values. Text becomes a text node and never markup: it comes from models and functions.

const SVG = "http://www.w3.org/2000/svg";
// Escape sequences of terminals: CSI, OSC and the like, then any other control character but tab and newline.
const SEQUENCES = /\u001b\[[0-?]*[ -/]*[@-~]|[\u001b\u009d][\]PX^_]?[^\u0007\u001b\u009c]*(?:\u0007|\u001b\\|\u009c)|\u001b[ -/]*[0-~]?/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const DISGUISES = /[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]/g;

/** Return `text` without escape sequences and control characters; marks that reorder text are written out. */
export function clean(text) {
  return String(text)
    .replace(/\r\n?/g, "\n")
    .replace(SEQUENCES, "")
    .replace(CONTROLS, "")
    .replace(DISGUISES, (mark) => "\\u" + mark.codePointAt(0).toString(16));
}

/**
 * Return an element: `h("p.note.wide", { id: "x" }, "text", …)`. A plain object behind the name holds attributes; names
 * that begin with `on` are listeners.
 */
export function h(name, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  if (children[0]?.constructor === Object) apply(element, children.shift());
  fill(element, children);
  return element;
}

/** Return an element of SVG. */
export function s(tag, given, ...children) {
  const element = document.createElementNS(SVG, tag);
  apply(element, given);
  fill(element, children);
  return element;
}

function apply(element, given) {
  for (const [name, value] of Object.entries(given || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : clean(value));
  }
}

function fill(element, children) {
  for (const child of children.flat(3)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
}

/** Replace the children of `element`. */
export function replace(element, ...children) {
  element.replaceChildren();
  fill(element, children);
}

const URLS = /https?:\/\/[^\s<>"'`\u0000-\u001f]+[^\s<>"'`.,;:!?)\]}]/g;

/** Return text nodes, with a link for each address of http or https. */
export function linked(text) {
  const parts = [];
  let end = 0;
  const plain = clean(text);
  for (const found of plain.matchAll(URLS)) {
    let url;
    try {
      url = new URL(found[0]);
    } catch {
      continue;
    }
    if (url.protocol !== "http:" && url.protocol !== "https:") continue;
    parts.push(plain.slice(end, found.index));
    parts.push(h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, found[0]));
    end = found.index + found[0].length;
  }
  parts.push(plain.slice(end));
  return parts;
}

const SHAPES = {
  pending: ["M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11", 0],
  queued: ["M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11", 0],
  running: ["M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11M6.8 5.8l3.2 2.2l-3.2 2.2z", 1],
  waiting_input: ["M4.5 6a3.5 3.5 0 1 1 5 3.2c-1 .5-1.5 1-1.5 2M8 13.6v.4", 0],
  completed: ["M2.5 8.5l3.5 3.5l7.5 -8", 0],
  failed: ["M3.5 3.5l9 9M12.5 3.5l-9 9", 0],
  skipped: ["M3 4l4 4l-4 4M9 4l4 4l-4 4", 0],
  cancelled: ["M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11M4.2 4.2l7.6 7.6", 0],
  cancelling: ["M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 1 0 0 -11M5 8h6", 0],
  interrupted: ["M8 2v7.5M8 13v.6", 0],
};

/** Return the shape of a status: each status has its own, so no colour is needed to tell them apart. */
export function icon(status) {
  const [path, half] = SHAPES[status] || SHAPES.pending;
  return s(
    "svg",
    { class: `icon s-${status}`, viewBox: "0 0 16 16", "aria-hidden": "true" },
    s("path", { d: path, class: half ? "half" : "" }),
  );
}

export const words = (status) => status.replace("_", " ");

/** Return the shape and the word of a status. */
export function status(value) {
  return h("span", { class: `status s-${value}` }, icon(value), words(value));
}

export function button(text, onclick, given) {
  return h("button", { type: "button", onclick, ...given }, text);
}
