// The list of the tasks: only the lines in view are elements, so ten thousand tasks scroll and change quickly.

import { h, icon, replace, words } from "./dom.js";
import { cost, count, seconds, time, tokens } from "./format.js";
import { noteOf } from "./selection.js";

const BESIDE = 12;

export class TaskList extends HTMLElement {
  constructor() {
    super();
    this.onpick = () => {};
    this.cursor = 0;
    this.pool = new Map();
  }

  connectedCallback() {
    if (this.space) return;
    this.space = h("div.space", { role: "presentation" });
    this.append(this.space);
    this.setAttribute("role", "treegrid");
    this.setAttribute("tabindex", "0");
    this.setAttribute("aria-label", "Tasks");
    this.addEventListener("scroll", () => this.draw(), { passive: true });
    this.addEventListener("keydown", (event) => this.press(event));
    this.addEventListener("click", (event) => this.click(event));
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this);
  }

  disconnectedCallback() {
    this.sizes?.disconnect();
    this.sizes = null;
    this.space?.remove();
    this.space = null;
    this.pool.clear();
  }

  show(selection) {
    this.selection = selection;
    this.cursor = Math.min(this.cursor, Math.max(selection.lines.length - 1, 0));
    this.draw();
  }

  get height() {
    return matchMedia("(max-width: 640px)").matches ? 48 : 32;
  }

  draw() {
    if (!this.selection || !this.space) return;
    const lines = this.selection.lines;
    const height = this.height;
    this.space.style.height = `${lines.length * height}px`;
    this.setAttribute("aria-rowcount", String(lines.length));
    const from = Math.max(0, Math.floor(this.scrollTop / height) - BESIDE);
    const to = Math.min(lines.length, Math.ceil((this.scrollTop + this.clientHeight) / height) + BESIDE);
    const kept = new Set();
    for (let n = from; n < to; n += 1) {
      const line = lines[n];
      const key = line.row ? line.row.id : `*${line.group}`;
      kept.add(key);
      let element = this.pool.get(key);
      const face = this.face(line, n);
      if (!element) {
        element = h("div.line", { role: "row", id: `line-${key}` });
        this.pool.set(key, element);
        this.space.append(element);
      }
      if (element.face !== face) {
        element.face = face;
        this.fill(element, line, n);
      }
      element.style.transform = `translateY(${n * height}px)`;
    }
    for (const [key, element] of this.pool)
      if (!kept.has(key)) {
        element.remove();
        this.pool.delete(key);
      }
    const at = lines[this.cursor];
    if (at) this.setAttribute("aria-activedescendant", `line-${at.row ? at.row.id : `*${at.group}`}`);
  }

  face(line, n) {
    const chosen = line.row && line.row.id === this.selection.task;
    const second = line.row?.status === "running" ? Math.floor(Date.now() / 1000) : 0;
    const shown = line.row ? JSON.stringify(line.row) : JSON.stringify([line.open, counts(line.parts), total(line.parts)]);
    return `${n}|${n === this.cursor}|${chosen}|${second}|${line.level}|${shown}`;
  }

  fill(element, line, n) {
    const state = line.row ? line.row.status : line.state;
    const chosen = Boolean(line.row) && line.row.id === this.selection.task;
    element.className = `line level-${line.level}${n === this.cursor ? " cursor" : ""}${chosen ? " chosen" : ""}${line.row ? "" : " group"}`;
    element.dataset.line = n;
    element.setAttribute("aria-rowindex", String(n + 1));
    element.setAttribute("aria-level", String(line.level + 1));
    element.setAttribute("aria-selected", String(chosen));
    if (line.row) {
      element.removeAttribute("aria-expanded");
      const row = line.row;
      const took = row.duration_s ?? (row.status === "running" && row.started_at ? (Date.now() - time(row.started_at)) / 1000 : null);
      replace(element,
        cell("c-state", icon(state)),
        cell("c-id", h("span.name", row.id), row.item && h("span.item", row.item)),
        cell("c-note", h("b", { class: `s-${state}` }, words(state)), " ", h("span", noteOf(row))),
        cell("c-num", row.attempts > 1 ? `${row.attempts}×` : ""),
        cell("c-num", seconds(took)),
        cell("c-num", tokens(row.tokens)),
        cell("c-num", cost(row.cost_usd)));
      return;
    }
    element.setAttribute("aria-expanded", String(line.open));
    const sums = total(line.parts);
    replace(element,
      cell("c-state", h("span.twist", { "aria-hidden": "true" }, line.open ? "▾" : "▸"), icon(state)),
      cell("c-id", h("span.name", `${line.group}.*`)),
      cell("c-note", `${count(line.parts.length)} parts: `, counts(line.parts)),
      cell("c-num", ""), cell("c-num", ""), cell("c-num", tokens(sums.tokens)), cell("c-num", cost(sums.cost)));
  }

  click(event) {
    const element = event.target.closest(".line");
    if (!element) return;
    this.cursor = Number(element.dataset.line);
    this.open();
  }

  open() {
    const line = this.selection.lines[this.cursor];
    if (!line) return;
    if (line.row) this.onpick(line.row.id);
    else this.ontoggle(line.group);
  }

  press(event) {
    const last = this.selection.lines.length - 1;
    const page = Math.max(1, Math.floor(this.clientHeight / this.height) - 1);
    const line = this.selection.lines[this.cursor];
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last };
    if (event.key in moves && !event.ctrlKey && !event.metaKey) this.move(Math.min(last, Math.max(0, this.cursor + moves[event.key])));
    else if (event.key === "Enter" || event.key === " ") this.open();
    else if (event.key === "ArrowRight" && line?.group && !line.open) this.ontoggle(line.group, true);
    else if (event.key === "ArrowLeft" && line?.group && line.open) this.ontoggle(line.group, false);
    else return;
    event.preventDefault();
  }

  move(to) {
    this.cursor = to;
    const top = to * this.height;
    if (top < this.scrollTop) this.scrollTop = top;
    if (top + this.height > this.scrollTop + this.clientHeight) this.scrollTop = top + this.height - this.clientHeight;
    this.draw();
  }

  /** Move to a task, if it has a line. */
  reveal(task) {
    const n = this.selection?.lineOf(task);
    if (n >= 0) this.move(n);
  }
}

const cell = (name, ...children) => h("span", { class: name, role: "gridcell" }, children);

export function counts(parts) {
  const found = {};
  for (const row of parts) found[row.status] = (found[row.status] || 0) + 1;
  return Object.entries(found).map(([status, number]) => `${count(number)} ${words(status)}`).join(", ");
}

function total(parts) {
  let sum = 0;
  let dollars = null;
  for (const row of parts) {
    sum += row.tokens || 0;
    if (row.cost_usd !== undefined) dollars = (dollars || 0) + row.cost_usd;
  }
  return { tokens: sum, cost: dollars };
}

customElements.define("plait-tasks", TaskList);
