// The timeline: a canvas with a bar for each attempt, and a thin line for the wait before it. The list has the same
// lines for keyboards and screen readers.

import { button, h, replace } from "./dom.js";
import { clock, cut, plural, seconds, time, words } from "./format.js";
import { noteOf } from "./selection.js";

const LINE = 22;
const HEAD = 24;
const REDRAW_MS = 500;
const SHORTEST = 2; // pixels; shorter bars run together
/** The colours of attempts in the order of drawing, and the least width of a bar in pixels. */
const BARS = {
  completed: ["completed", 1],
  skipped: ["skipped", 2],
  cancelled: ["cancelled", 2],
  interrupted: ["interrupted", 2],
  retried: ["failed", 2],
  asked: ["waiting_input", 3],
  running: ["running", 3],
  failed: ["failed", 3],
};
const LOOK = ["mono", "text", "muted", "line", "chosen", "back", "pending", ...new Set(Object.values(BARS).map(([name]) => name))];
const DARK = matchMedia("(prefers-color-scheme: dark)");
const STEPS = [0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];

/** Return the attempts of a task as `[status, start, end]`, without an end while under way. */
const attemptsOf = (row) => row.tries || (row.start ? [[row.status, row.start, row.end]] : []);

export class Timeline {
  constructor(onpick, ontoggle) {
    this.onpick = onpick;
    this.ontoggle = ontoggle;
    this.zoom = 1;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.pen = this.canvas.getContext("2d");
    this.space = h("div.space", this.canvas);
    this.scroll = h("div.scroller", {
      tabindex: "0", role: "group", "aria-label": "Timeline; the list shows the same tasks",
      onkeydown: (event) => this.press(event), onscroll: () => this.later(), onclick: (event) => this.pick(event),
      onpointermove: (event) => this.point(event), onpointerleave: () => (this.tip.hidden = true),
    }, this.space);
    this.tip = h("div.tip", { hidden: true });
    this.element = h("div.timeline", this.scroll, this.tip, zoomButtons((by) => this.scale(by), () => this.scale(0)));
    onzoom(this.scroll, (by, event) => this.scale(by, event));
    new ResizeObserver(() => this.later()).observe(this.scroll);
    this.onscheme = () => ((this.look = null), this.later());
    DARK.addEventListener("change", this.onscheme);
  }

  close() {
    DARK.removeEventListener("change", this.onscheme);
    clearTimeout(this.timer);
  }

  show(selection, run) {
    this.selection = selection;
    this.run = run;
    this.later();
  }

  later() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  /** Find the first and the last moment, and forget the bars of groups, if tasks have changed. */
  gather() {
    if (this.version !== this.selection.version) {
      this.version = this.selection.version;
      this.gathered = new Map();
      this.first = time(this.run?.started_at) || Infinity;
      this.last = 0;
      for (const row of this.selection.all)
        for (const [, start, end] of attemptsOf(row)) {
          this.first = Math.min(this.first, start);
          this.last = Math.max(this.last, end || start);
        }
    }
    // The present moment for a run under way; the last moment of a run that no process runs.
    const isLive = this.run?.status === "running" || this.run?.status === "cancelling";
    this.now = isLive ? Date.now() : this.last;
    return isLive;
  }

  /** Return the bars of all parts of a group, by their starts. */
  barsOf(group) {
    if (!this.gathered.has(group.name)) this.gathered.set(group.name, group.parts.flatMap(attemptsOf).sort((one, other) => one[1] - other[1]));
    return this.gathered.get(group.name);
  }

  scale(by, event) {
    const left = (event ? event.clientX - this.scroll.getBoundingClientRect().left : this.width / 2) - this.gutter;
    const at = (this.scroll.scrollLeft + left) / this.zoom;
    this.zoom = by ? Math.min(Math.max(this.zoom * by, 1), 5000) : 1;
    this.draw();
    this.scroll.scrollLeft = at * this.zoom - left;
  }

  /** Measure the view and the pixels of a millisecond. */
  place() {
    this.width = this.scroll.clientWidth;
    this.height = this.scroll.clientHeight;
    this.gutter = this.width < 560 ? 96 : 180;
    const wide = Math.max(this.width - this.gutter - 16, 50) * this.zoom;
    this.perMs = wide / Math.max(this.now - this.first, 1000);
    this.space.style.width = `${wide + this.gutter + 16}px`;
    this.space.style.height = `${this.selection.lines.length * LINE + HEAD}px`;
    this.top = this.scroll.scrollTop;
    this.left = this.gutter - this.scroll.scrollLeft;
    const ratio = devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.round(this.width * ratio) || canvas.height !== Math.round(this.height * ratio)) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
    }
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  x(at) {
    return this.left + (at - this.first) * this.perMs;
  }

  draw() {
    if (!this.selection || !this.scroll.isConnected) return;
    const isLive = this.gather();
    this.place();
    const { pen, width, height } = this;
    const look = (this.look ||= this.readLook());
    pen.clearRect(0, 0, width, height);
    pen.font = `12px ${look.font}`;
    pen.textBaseline = "middle";
    if (!this.last) {
      pen.fillStyle = look.muted;
      pen.fillText("No attempt has started yet.", 16, HEAD + 20);
    } else this.drawLines(look);
    clearTimeout(this.timer);
    if (isLive) this.timer = setTimeout(() => this.later(), REDRAW_MS);
  }

  drawLines(look) {
    const { pen, width, height, gutter } = this;
    const first = Math.floor(this.top / LINE);
    const lines = this.selection.lines.slice(first, Math.ceil((this.top + height) / LINE));
    const places = lines.map((line, n) => [line, HEAD + (first + n) * LINE - this.top]);
    pen.save();
    clip(pen, 0, HEAD, width, height);
    this.drawGrid(look);
    for (const [line, y] of places) this.drawName(line, y, look);
    clip(pen, gutter, HEAD, width, height);
    for (const [{ row, group }, y] of places) {
      if (row) this.drawWaits(row, y, look);
      this.drawBars(row ? attemptsOf(row) : this.barsOf(group), y, look);
    }
    pen.restore();
    pen.font = `12px ${look.font}`;
    pen.fillStyle = look.muted;
    for (const [x, at] of this.ticks()) pen.fillText(seconds(at).replace(".0 s", " s"), x + 3, HEAD / 2);
    pen.fillRect(0, HEAD - 1, width, 1);
  }

  drawName({ row, group, level, open }, y, look) {
    const { pen } = this;
    if (row && row.id === this.selection.task) {
      pen.fillStyle = look.chosen;
      pen.fillRect(0, y, this.width, LINE);
    }
    pen.fillStyle = look[(row || group).status];
    pen.fillRect(6, y + 6, 3, LINE - 12);
    pen.fillStyle = look.text;
    const left = 14 + level * 10;
    pen.font = `12px ${look.mono}`;
    const wide = (this.wide ||= pen.measureText("m").width);
    pen.fillText(cut(row ? row.id : `${open ? "▾" : "▸"} ${group.name}.*`, this.gutter - left - 8, wide), left, y + LINE / 2);
  }

  /** Draw bars, given by their starts. Short ones run together; failed and running ones keep a least width. */
  drawBars(bars, y, look) {
    const { pen, width, gutter, now } = this;
    const found = {};
    for (const [status, start, end] of bars) {
      const [from, to] = [this.x(start), this.x(end || now)];
      if (to < gutter || from > width) continue;
      const drawn = (found[status] ||= []);
      const last = drawn.at(-1);
      const isShort = last && (to - from < SHORTEST || last[1] - last[0] < SHORTEST);
      if (last && (from < last[1] || (isShort && from < last[1] + 1))) last[1] = Math.max(last[1], to);
      else drawn.push([from, to]);
    }
    for (const [status, [colour, least]] of Object.entries(BARS))
      for (const [from, to] of found[status] || []) {
        const wide = Math.max(to - from, least);
        pen.fillStyle = look[colour];
        pen.globalAlpha = status === "retried" || status === "interrupted" ? 0.55 : 1;
        pen.fillRect(wide > to - from ? Math.round(from) : from, y + 5, wide, LINE - 10); // between two pixels, a short bar would be pale
        pen.globalAlpha = 1;
        if (status === "failed" && wide > 8) {
          pen.strokeStyle = look.back;
          stroke(pen, [from + 2, y + 7, from + 7, y + LINE - 7], [from + 7, y + 7, from + 2, y + LINE - 7]);
        }
      }
  }

  /** Draw the waits: from the end of the last dependency to the start, between attempts, and of a waiting task. */
  drawWaits(row, y, look) {
    let since = time(this.run?.started_at);
    let before = "";
    for (const position of row.deps || []) since = Math.max(since, this.selection.all[position]?.end || Infinity);
    for (const [status, start, end] of attemptsOf(row)) {
      this.drawWait(since, start, y, before === "asked" ? look.waiting_input : look.muted);
      since = end;
      before = status;
    }
    if (row.status === "waiting_input") this.drawWait(since, this.now, y, look.waiting_input);
    if (row.status === "pending") this.drawWait(since, this.now, y, look.muted);
  }

  drawWait(from, to, y, colour) {
    const [left, right] = [Math.max(this.x(from), this.gutter), Math.min(this.x(to), this.width)];
    if (!(left < right)) return;
    this.pen.strokeStyle = colour;
    this.pen.setLineDash([2, 3]);
    stroke(this.pen, [left, y + LINE / 2, right, y + LINE / 2]);
    this.pen.setLineDash([]);
  }

  /** Return the places of the ticks, each with its seconds. */
  ticks() {
    const step = STEPS.find((one) => one * 1000 * this.perMs > 80) || 86_400 * Math.ceil(80 / (86_400_000 * this.perMs));
    const found = [];
    for (let n = Math.max(0, Math.floor((this.gutter - this.left) / this.perMs / (step * 1000))); found.length < 60; n += 1) {
      const x = this.x(this.first + n * step * 1000);
      if (x > this.width) break;
      if (x >= this.gutter) found.push([x, n * step]);
    }
    return found;
  }

  drawGrid(look) {
    this.pen.strokeStyle = look.line;
    stroke(this.pen, ...this.ticks().map(([x]) => [Math.round(x) + 0.5, HEAD, Math.round(x) + 0.5, this.height]));
  }

  readLook() {
    const found = getComputedStyle(this.element);
    return { font: found.fontFamily, ...Object.fromEntries(LOOK.map((name) => [name, found.getPropertyValue(`--${name}`).trim()])) };
  }

  lineAt(event) {
    const y = event.clientY - this.scroll.getBoundingClientRect().top;
    return y < HEAD ? null : this.selection?.lines[Math.floor((y - HEAD + this.scroll.scrollTop) / LINE)];
  }

  point(event) {
    const line = this.lineAt(event);
    this.tip.hidden = !line;
    if (!line) return;
    const { row, group } = line;
    const box = this.element.getBoundingClientRect();
    const at = this.first + (event.clientX - box.left - this.left) / this.perMs;
    const near = 3 / this.perMs;
    const bars = row ? attemptsOf(row) : [];
    const n = bars.findIndex(([, start, end]) => at >= start - near && at <= (end || this.now) + near);
    const [status, start, end] = bars[n] || [];
    replace(this.tip, row
      ? [h("b", row.id), `: ${words(row.status)}`, bars[n] && h("div", `attempt ${n + 1} ${status}, ${clock(start)}, ${seconds(((end || this.now) - start) / 1000)}`), noteOf(row) && h("div.about", noteOf(row))]
      : [h("b", `${group.name}.*`), `: ${plural(group.parts.length, "part")}`]);
    this.tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 260)}px`;
    this.tip.style.top = `${Math.min(event.clientY - box.top + 14, box.height - 70)}px`;
  }

  pick(event) {
    const line = this.lineAt(event);
    if (line?.row) this.onpick(line.row.id);
    else if (line) this.ontoggle(line.group.name);
  }

  /** Up and down choose the next task, plus and minus zoom. */
  press(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const by = { "+": 1.6, "-": 1 / 1.6 }[event.key];
    if (!step && !by) return;
    event.preventDefault();
    if (by) return this.scale(by);
    const { lines } = this.selection;
    let n = this.selection.lineOf(this.selection.task);
    do n += step;
    while (lines[n]?.group);
    if (!lines[n]) return;
    this.onpick(lines[n].row.id);
    const top = n * LINE;
    if (top < this.top || top > this.top + this.height - 2 * LINE) this.scroll.scrollTop = top - this.height / 2;
  }
}

function clip(pen, left, top, right, bottom) {
  pen.beginPath();
  pen.rect(left, top, right - left, bottom - top);
  pen.clip();
}

function stroke(pen, ...lines) {
  pen.beginPath();
  for (const [x, y, right, bottom] of lines) {
    pen.moveTo(x, y);
    pen.lineTo(right, bottom);
  }
  pen.stroke();
}

/** Return the buttons that zoom a picture. */
export function zoomButtons(scale, fit) {
  return h("div.zoom", button("−", () => scale(1 / 1.5), { "aria-label": "Zoom out" }), button("fit", fit), button("+", () => scale(1.5), { "aria-label": "Zoom in" }));
}

/** Call `scale` when the wheel turns with the control key, as for a pinch. */
export function onzoom(element, scale) {
  element.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    scale(event.deltaY < 0 ? 1.2 : 1 / 1.2, event);
  }, { passive: false });
}
