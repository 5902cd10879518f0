// The timeline: a canvas with a bar for each attempt, and a thin line for the wait before it. The list has the same
// lines for keyboards and screen readers.

import { button, h, replace, words } from "./dom.js";
import { clock, plural, seconds, time } from "./format.js";
import { noteOf } from "./selection.js";

const LINE = 22;
const HEAD = 24;
const SHORTEST = 2;
const URGENT_WIDTH = 3;
const URGENT = new Set(["failed", "running", "asked"]);
const TASK_OF = { asked: "waiting_input", retried: "failed", interrupted: "interrupted" };
const STEPS = [0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400];

export class Timeline {
  constructor(onpick, ontoggle) {
    this.onpick = onpick;
    this.ontoggle = ontoggle;
    this.zoom = 1;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.space = h("div.space", this.canvas);
    this.scroll = h("div.scroller", { tabindex: "0", role: "group", "aria-label": "Timeline; the list shows the same tasks", onkeydown: (event) => this.press(event) }, this.space);
    this.tip = h("div.tip", { hidden: true });
    this.element = h("div.timeline", this.scroll, this.tip,
      h("div.zoom", button("−", () => this.scale(1 / 1.6), { "aria-label": "Zoom out" }), button("fit", () => this.scale(0)), button("+", () => this.scale(1.6), { "aria-label": "Zoom in" })));
    this.scroll.addEventListener("scroll", () => this.later(), { passive: true });
    this.scroll.addEventListener("wheel", (event) => event.ctrlKey && (event.preventDefault(), this.scale(event.deltaY < 0 ? 1.2 : 1 / 1.2, event)), { passive: false });
    this.scroll.addEventListener("pointermove", (event) => this.point(event));
    this.scroll.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.scroll.addEventListener("click", (event) => this.pick(event));
    new ResizeObserver(() => this.later()).observe(this.scroll);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ((this.colours = null), this.later()));
  }

  show(selection, attempts, run) {
    this.selection = selection;
    this.run = run;
    if (attempts !== this.attempts) {
      this.attempts = attempts;
      this.bars = new Map();
      this.gathered = new Map();
      for (const [task, attempt, status, start, end] of attempts) {
        if (!this.bars.has(task)) this.bars.set(task, []);
        this.bars.get(task).push({ attempt, status, start: time(start), end: time(end) });
      }
    }
    this.later();
  }

  later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  /** Return the first and the last moment that the timeline shows. */
  bounds() {
    let [from, to] = [Infinity, -Infinity];
    for (const bars of this.bars.values())
      for (const bar of bars) {
        from = Math.min(from, bar.start);
        to = Math.max(to, Number.isNaN(bar.end) ? this.now() : bar.end);
      }
    if (this.run?.started_at) from = Math.min(from, time(this.run.started_at));
    return from < to ? [from, to] : [from, from + 1000];
  }

  /** Return the present for a run under way; the end of a run that no process runs. */
  now() {
    const ended = this.run?.ended_at ? time(this.run.ended_at) : NaN;
    if (!Number.isNaN(ended)) return ended;
    if (this.run?.status === "running" || this.run?.status === "cancelling") return Date.now();
    let last = 0;
    for (const bars of this.bars.values()) for (const bar of bars) last = Math.max(last, bar.start, bar.end || 0);
    return last;
  }

  get gutter() {
    return this.scroll.clientWidth < 560 ? 96 : 180;
  }

  scale(by, event) {
    const before = this.zoom;
    const left = (event ? event.clientX - this.scroll.getBoundingClientRect().left : this.scroll.clientWidth / 2) - this.gutter;
    const at = (this.scroll.scrollLeft + left) / before;
    this.zoom = by ? Math.min(Math.max(this.zoom * by, 1), 5000) : 1;
    this.draw();
    this.scroll.scrollLeft = at * this.zoom - left;
  }

  place() {
    const [from, to] = this.bounds();
    const width = Math.max(this.scroll.clientWidth - this.gutter - 16, 50) * this.zoom;
    this.from = from;
    this.perMs = width / (to - from);
    this.to = to;
    this.space.style.width = `${width + this.gutter + 16}px`;
    this.space.style.height = `${this.selection.lines.length * LINE + HEAD}px`;
  }

  x(at) {
    return this.gutter + (at - this.from) * this.perMs - this.scroll.scrollLeft;
  }

  draw() {
    if (!this.selection || !this.bars || !this.scroll.isConnected) return;
    if (!this.bars.size) this.from = NaN;
    this.place();
    const [width, height, ratio] = [this.scroll.clientWidth, this.scroll.clientHeight, devicePixelRatio || 1];
    if (this.canvas.width !== width * ratio || this.canvas.height !== height * ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const pen = (this.pen = this.canvas.getContext("2d"));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const look = this.look();
    pen.font = `12px ${look.font}`;
    pen.textBaseline = "middle";
    if (!this.bars.size) {
      pen.fillStyle = look.muted;
      pen.fillText("No attempt has started yet.", 16, HEAD + 20);
      return;
    }
    pen.save();
    pen.beginPath();
    pen.rect(0, HEAD, width, height - HEAD);
    pen.clip();
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / LINE));
    const last = Math.min(this.selection.lines.length, Math.ceil((this.scroll.scrollTop + height) / LINE) + 1);
    this.grid(look, width, height);
    for (let n = first; n < last; n += 1) this.line(this.selection.lines[n], HEAD + n * LINE - this.scroll.scrollTop, look, width);
    pen.restore();
    this.axis(look, width);
    if (this.run?.status === "running") setTimeout(() => this.later(), 500);
  }

  line(line, y, look, width) {
    const pen = this.pen;
    const chosen = line.row && line.row.id === this.selection.task;
    if (chosen) {
      pen.fillStyle = look.chosen;
      pen.fillRect(0, y, width, LINE);
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, y, width - this.gutter, LINE);
    pen.clip();
    if (line.row) {
      const bars = this.bars.get(line.row.id) || [];
      this.waits(line.row, bars, y, look);
      this.merged(bars, y, look);
    } else this.merged(this.barsOf(line), y, look);
    pen.restore();
    const status = line.row ? line.row.status : line.state;
    pen.fillStyle = look[status] || look.muted;
    pen.fillRect(6, y + 6, 3, LINE - 12);
    pen.fillStyle = look.text;
    const name = line.row ? line.row.id : `${line.open ? "▾" : "▸"} ${line.group}.*`;
    pen.fillText(this.fit(name, this.gutter - 22 - line.level * 10), 14 + line.level * 10, y + LINE / 2);
  }

  /** Return the bars of all parts of a group, by their starts. */
  barsOf({ group, parts }) {
    const key = `${group} ${parts.length}`;
    if (!this.gathered.has(key))
      this.gathered.set(key, parts.flatMap((row) => this.bars.get(row.id) || []).sort((one, other) => one.start - other.start));
    return this.gathered.get(key);
  }

  /** Draw bars. Bars of less than two pixels run together; those that failed or are running keep three pixels. */
  merged(bars, y, look) {
    const pen = this.pen;
    const urgent = [];
    let [from, to] = [NaN, NaN];
    const flush = () => {
      if (!Number.isNaN(from)) pen.fillRect(from, y + 5, Math.max(to - from, 1), LINE - 10);
      from = NaN;
    };
    pen.fillStyle = look.completed;
    for (const bar of bars) {
      const [start, end] = [this.x(bar.start), this.x(Number.isNaN(bar.end) ? this.now() : bar.end)];
      if (end < this.gutter || start > this.canvas.clientWidth) continue;
      if (bar.status !== "completed") urgent.push([bar, start, end]);
      else if (!Number.isNaN(from) && start - to < 1 && (end - start < SHORTEST || to - from < SHORTEST)) to = Math.max(to, end);
      else {
        flush();
        [from, to] = [start, end];
      }
    }
    flush();
    for (const [bar, start, end] of urgent) {
      const name = TASK_OF[bar.status] || bar.status;
      const wide = Math.max(end - start, URGENT.has(bar.status) ? URGENT_WIDTH : SHORTEST);
      const left = wide > end - start ? Math.round(start) : start; // between two pixels, a short bar would be pale
      pen.fillStyle = look[name] || look.muted;
      if (bar.status === "retried" || bar.status === "interrupted") pen.globalAlpha = 0.55;
      pen.fillRect(left, y + 5, wide, LINE - 10);
      pen.globalAlpha = 1;
      if (bar.status === "failed" && wide > 8) {
        pen.strokeStyle = look.back;
        pen.beginPath();
        pen.moveTo(start + 2, y + 7);
        pen.lineTo(start + 7, y + LINE - 7);
        pen.moveTo(start + 7, y + 7);
        pen.lineTo(start + 2, y + LINE - 7);
        pen.stroke();
      }
    }
  }

  /** Draw the waits: from the end of the last dependency to the start, and between attempts. */
  waits(row, bars, y, look) {
    const pen = this.pen;
    let since = time(this.run?.started_at);
    for (const one of row.deps || []) since = Math.max(since, time(this.selection.all[one]?.ended_at) || Infinity);
    for (const bar of bars) {
      if (bar.start - since > 0) this.wait(since, bar.start, y, look[this.lastStatus === "asked" ? "waiting_input" : "muted"]);
      since = bar.end;
      this.lastStatus = bar.status;
    }
    this.lastStatus = null;
    const open = row.status === "waiting_input" ? "waiting_input" : row.status === "pending" ? "muted" : null;
    if (open && since < Infinity) this.wait(since, this.now(), y, look[open]);
    pen.setLineDash([]);
  }

  wait(from, to, y, colour) {
    const pen = this.pen;
    pen.strokeStyle = colour;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(this.x(from), y + LINE / 2);
    pen.lineTo(this.x(to), y + LINE / 2);
    pen.stroke();
    pen.setLineDash([]);
  }

  ticks() {
    const step = STEPS.find((one) => one * 1000 * this.perMs > 80) || 86_400 * Math.ceil(80 / (86_400_000 * this.perMs));
    const start = Math.max(0, Math.floor((this.scroll.scrollLeft / this.perMs) / (step * 1000)));
    const found = [];
    for (let n = start; found.length < 60; n += 1) {
      const x = this.x(this.from + n * step * 1000);
      if (x > this.canvas.clientWidth) break;
      if (x >= this.gutter) found.push([x, n * step]);
    }
    return found;
  }

  grid(look, width, height) {
    const pen = this.pen;
    pen.strokeStyle = look.line;
    pen.beginPath();
    for (const [x] of this.ticks()) {
      pen.moveTo(Math.round(x) + 0.5, HEAD);
      pen.lineTo(Math.round(x) + 0.5, height);
    }
    pen.stroke();
  }

  axis(look, width) {
    const pen = this.pen;
    pen.fillStyle = look.muted;
    for (const [x, at] of this.ticks()) pen.fillText(seconds(at).replace(".0 s", " s"), x + 3, HEAD / 2);
    pen.fillRect(0, HEAD - 1, width, 1);
  }

  fit(text, width) {
    if (this.pen.measureText(text).width <= width) return text;
    let [low, high] = [0, text.length];
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.pen.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
      else high = middle - 1;
    }
    return `${text.slice(0, low)}…`;
  }

  look() {
    if (this.colours) return this.colours;
    const found = getComputedStyle(this.element);
    const colour = (name) => found.getPropertyValue(name).trim();
    this.colours = { text: colour("--text"), muted: colour("--muted"), line: colour("--line"), chosen: colour("--chosen"), back: colour("--back"), font: found.fontFamily };
    for (const name of ["completed", "running", "failed", "waiting_input", "pending", "skipped", "cancelled", "interrupted"]) this.colours[name] = colour(`--${name}`);
    return this.colours;
  }

  lineAt(event) {
    const box = this.scroll.getBoundingClientRect();
    const y = event.clientY - box.top;
    return y < HEAD ? null : this.selection?.lines[Math.floor((y - HEAD + this.scroll.scrollTop) / LINE)];
  }

  point(event) {
    const line = this.bars && this.lineAt(event);
    this.tip.hidden = !line;
    if (!line) return;
    const box = this.element.getBoundingClientRect();
    const at = this.from + (event.clientX - box.left - this.gutter + this.scroll.scrollLeft) / this.perMs;
    const bars = line.row ? this.bars.get(line.row.id) || [] : [];
    const near = URGENT_WIDTH / this.perMs;
    const bar = bars.find((one) => at >= one.start - near && at <= (Number.isNaN(one.end) ? this.now() : one.end) + near);
    replace(this.tip, line.row
      ? [h("b", line.row.id), `: ${words(line.row.status)}`, bar && h("div", `attempt ${bar.attempt} ${bar.status}, ${clock(bar.start)}, ${seconds(((bar.end || this.now()) - bar.start) / 1000)}`), noteOf(line.row) && h("div.about", noteOf(line.row))]
      : [h("b", `${line.group}.*`), `: ${plural(line.parts.length, "part")}`]);
    this.tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 260)}px`;
    this.tip.style.top = `${Math.min(event.clientY - box.top + 14, box.height - 70)}px`;
  }

  pick(event) {
    const line = this.lineAt(event);
    if (line?.row) this.onpick(line.row.id);
    else if (line) this.ontoggle(line.group);
  }

  /** Up and down choose the next task, plus and minus zoom. */
  press(event) {
    if (event.key === "+" || event.key === "-") this.scale(event.key === "+" ? 1.6 : 1 / 1.6);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const step = event.key === "ArrowDown" ? 1 : -1;
      const lines = this.selection.lines;
      let n = this.selection.lineOf(this.selection.task);
      do n += step;
      while (lines[n] && !lines[n].row);
      if (!lines[n]) return;
      this.onpick(lines[n].row.id);
      const top = n * LINE;
      if (top < this.scroll.scrollTop || top > this.scroll.scrollTop + this.scroll.clientHeight - 2 * LINE) this.scroll.scrollTop = Math.max(0, top - this.scroll.clientHeight / 2);
    } else return;
    event.preventDefault();
  }
}
