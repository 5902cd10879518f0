// The graph: boxes and curves at the places that the server computes, coloured by the state of the tasks.

import { get } from "./api.js";
import { button, h, replace, s, words } from "./dom.js";
import { count, seconds } from "./format.js";
import { counts } from "./list.js";
import { groupStatus, noteOf } from "./selection.js";

const MARGIN = 24;
const SHAPE = { completed: "✓", failed: "✕", running: "▶", waiting_input: "?", pending: "○", skipped: "»", cancelled: "⊘" };

export class GraphView {
  constructor(run, onpick) {
    this.run = run;
    this.onpick = onpick;
    this.zoom = 1;
    this.scroll = h("div.scroller");
    this.element = h("div.graph", this.scroll,
      h("div.zoom", button("−", () => this.scale(1 / 1.3), { "aria-label": "Zoom out" }), button("fit", () => this.fit()), button("+", () => this.scale(1.3), { "aria-label": "Zoom in" })));
    this.scroll.addEventListener("wheel", (event) => event.ctrlKey && (event.preventDefault(), this.scale(event.deltaY < 0 ? 1.15 : 1 / 1.15)), { passive: false });
  }

  /** Read the places again if tasks were added. */
  async read(selection) {
    this.selection = selection;
    if (this.size === selection.rows.size || this.asking) return this.show(selection);
    this.asking = true;
    try {
      const size = selection.rows.size;
      const picture = await get(`/page/runs/${encodeURIComponent(this.run)}/graph`);
      this.size = size;
      this.build(picture);
    } catch {
      // the stream shows that the server cannot be reached
    } finally {
      this.asking = false;
    }
    this.show(this.selection);
  }

  build(picture) {
    const first = !this.picture;
    this.picture = picture;
    this.boxes = new Map();
    const edges = picture.edges.map((numbers) => {
      let [x, y] = numbers;
      let path = `M${x} ${y}`;
      for (let n = 2; n + 2 < numbers.length; n += 3) {
        const [left, to, right] = numbers.slice(n, n + 3);
        const middle = (x + left) / 2;
        path += `C${middle} ${y} ${middle} ${to} ${left} ${to}H${right}`;
        [x, y] = [right, to];
      }
      return s("path", { d: path, class: numbers.at(-1) ? "continues" : "" });
    });
    const nodes = picture.boxes.map((box) => {
      const state = s("text", { x: 10, y: 24, class: "shape", "aria-hidden": "true" });
      const name = s("text", { x: 28, y: 17 }, cut(box.name, box.width - 36));
      const note = s("text", { x: 28, y: 32, class: "note" });
      const title = s("title", {});
      const node = s("g", { class: "box", transform: `translate(${box.x} ${box.y})`, tabindex: "0", role: "button" },
        title, s("rect", { width: box.width, height: box.height, rx: 6 }), state, name, note);
      node.addEventListener("click", () => this.pick(box.name));
      node.addEventListener("keydown", (event) => this.press(event, box));
      this.boxes.set(box.name, { box, node, state, note, title });
      return node;
    });
    this.svg = s("svg", { role: "group", "aria-label": "Graph of the tasks", viewBox: `${-MARGIN} ${-MARGIN} ${picture.width + 2 * MARGIN} ${picture.height + 2 * MARGIN}` },
      s("g", { class: "edges" }, edges), nodes);
    replace(this.scroll, this.svg);
    if (first) this.fit();
    else this.scale(1);
  }

  fit() {
    if (!this.picture) return;
    const wide = this.scroll.clientWidth / (this.picture.width + 2 * MARGIN);
    const high = this.scroll.clientHeight / (this.picture.height + 2 * MARGIN);
    this.zoom = Math.min(1, Math.max(Math.min(wide, high), 0.55));
    this.scale(1);
  }

  scale(by) {
    this.zoom = Math.min(Math.max(this.zoom * by, 0.05), 3);
    this.svg.style.width = `${(this.picture.width + 2 * MARGIN) * this.zoom}px`;
    this.svg.style.height = `${(this.picture.height + 2 * MARGIN) * this.zoom}px`;
  }

  pick(name) {
    const isTask = this.selection.rows.has(name) && !this.folded(name);
    this.onpick(name, !isTask);
  }

  folded(name) {
    return !this.boxes.has(`${name}.0`) && !this.boxes.has(`${name}.1`) && this.selection.all.some((row) => row.group === name);
  }

  /** Arrow keys go to the nearest box in the direction. */
  press(event, from) {
    if (event.key === "Enter" || event.key === " ") return event.preventDefault(), this.pick(from.name);
    const [dx, dy] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] || [0, 0];
    if (!dx && !dy) return;
    event.preventDefault();
    let best = null;
    for (const { box, node } of this.boxes.values()) {
      const [x, y] = [box.x - from.x, box.y - from.y];
      const along = x * dx + y * dy;
      if (along <= 0) continue;
      const far = along + 3 * Math.abs(x * dy + y * dx);
      if (!best || far < best.far) best = { far, node };
    }
    best?.node.focus();
  }

  show(selection) {
    this.selection = selection;
    if (!this.boxes) return;
    const groups = new Map();
    for (const row of selection.all)
      if (row.group) {
        if (!groups.has(row.group)) groups.set(row.group, []);
        groups.get(row.group).push(row);
      }
    for (const [name, { box, node, state, note, title }] of this.boxes) {
      const row = selection.rows.get(name);
      const parts = groups.get(name);
      const grouped = parts && !this.boxes.has(parts[0].id);
      if (!row && !grouped) continue;
      const status = grouped ? groupStatus(parts) : row.status;
      const told = grouped ? `${count(parts.length)} parts: ${counts(parts)}` : [words(status), seconds(row.duration_s)].filter(Boolean).join(" · ");
      const dim = selection.filtered && !(grouped ? parts.some((one) => selection.fits(one)) : selection.fits(row));
      const face = `box s-${status}${dim ? " dim" : ""}${name === selection.task ? " chosen" : ""}${grouped ? " group" : ""}`;
      const full = `${name}: ${told}${!grouped && noteOf(row) ? `. ${noteOf(row)}` : ""}`;
      if (node.getAttribute("class") !== face) node.setAttribute("class", face);
      if (note.told !== full) {
        note.told = full;
        replace(state, SHAPE[status] || "○");
        replace(note, cut(told, box.width - 36, 6.1));
        replace(title, full);
      }
    }
  }
}

const cut = (text, width, wide = 7.3) => (text.length * wide <= width ? text : `${text.slice(0, Math.max(1, Math.floor(width / wide) - 1))}…`);
