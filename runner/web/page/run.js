// A run: its state and actions, and its tasks in three views of one selection, with the chosen task beside them.

import { get, Live, runPath } from "./api.js";
import { cancelRun, resumeRun } from "./dialog.js";
import { button, h, icon, replace, status, words } from "./dom.js";
import { clock, cost, count, elapsed, tokens } from "./format.js";
import { GraphView } from "./graph.js";
import { TaskList } from "./list.js";
import { owner, progress } from "./runs.js";
import { Selection, STATUSES } from "./selection.js";
import { TaskPanel } from "./task.js";
import { Timeline } from "./timeline.js";

const VIEWS = { list: "List", timeline: "Timeline", graph: "Graph" };
const DONE = ["completed", "failed", "cancelled"];
const RESUMABLE = ["interrupted", "waiting_input", "queued"];

export class RunPage {
  constructor(run, setLink) {
    this.run = run;
    this.setLink = setLink;
    this.selection = new Selection();
    this.view = "list";
    this.title = h("h1");
    this.facts = h("div.facts");
    this.actions = h("div.actions");
    this.bar = h("div.wide-bar");
    this.tabs = h("div.tabs", { role: "tablist", "aria-label": "View", onkeydown: (event) => this.pressTab(event) });
    this.chips = h("div.chips", { role: "group", "aria-label": "Status of the tasks" });
    this.find = h("input", { type: "search", placeholder: "Find a task", "aria-label": "Find tasks by id", oninput: () => this.set({ find: this.find.value }) });
    this.told = h("p.sr", { role: "status" });
    const pick = (task) => this.set({ task });
    const toggle = (name, open) => (this.selection.toggle(name, open), this.draw());
    this.list = new TaskList(pick, toggle);
    this.timeline = new Timeline(pick, toggle);
    this.graph = new GraphView(run, (name, group) => (group ? this.openGroup(name) : this.set({ task: name })));
    this.views = h("div.view", { role: "tabpanel" });
    this.side = h("div.side");
    this.element = h("section.run",
      h("div.head", h("div.titles", this.title, this.facts), this.actions), this.bar,
      h("div.tools", this.tabs, this.find, this.chips), this.told,
      h("div.split", this.views, this.side));
    this.timer = setInterval(() => document.hidden || !this.head || DONE.includes(this.head.status) || this.tick(), 1000);
  }

  close() {
    clearInterval(this.timer);
    this.live?.close();
  }

  /** Show the part of the run that the address names: `run/ID/task/TASK?view=…&status=…&find=…`. */
  navigate(parts, query) {
    const task = parts[2] === "task" ? parts[3] : null;
    this.selection.statuses = new Set(query.getAll("status"));
    this.selection.find = (query.get("find") || "").toLowerCase();
    if (document.activeElement !== this.find) this.find.value = query.get("find") || "";
    const view = query.get("view") in VIEWS ? query.get("view") : "list";
    const moved = task !== this.selection.task || !this.live;
    this.selection.task = task;
    this.selection.lay();
    if (moved) this.choose(task);
    if (view !== this.view || !this.views.firstChild) this.turn(view);
    this.draw();
  }

  /** Change a part of the address. */
  set({ task = this.selection.task, view = this.view, status: chosen = [...this.selection.statuses], find = this.find.value }) {
    const query = new URLSearchParams();
    if (view !== "list") query.set("view", view);
    for (const one of chosen) query.append("status", one);
    if (find) query.set("find", find);
    const path = `#/run/${encodeURIComponent(this.run)}${task ? `/task/${encodeURIComponent(task)}` : ""}`;
    location.hash = query.size ? `${path}?${query}` : path;
  }

  choose(task) {
    this.live?.close();
    const focused = this.side.contains(document.activeElement) || !task;
    this.panel = task ? new TaskPanel(this.run, () => this.set({ task: null })) : null;
    replace(this.side, this.panel?.element);
    this.element.classList.toggle("with-task", Boolean(task));
    if (!task && focused && this.view === "list") this.list.element.focus({ preventScroll: true });
    this.live = new Live(this.run, task, {
      opened: () => this.panel?.opened(),
      run: (head) => this.showHead(head),
      rows: ({ rows }) => this.selection.merge(rows),
      task: (detail) => this.panel?.show(detail),
      activity: ({ task_id: id, entries }) => id === this.selection.task && this.panel?.showActivity(entries),
      drawn: () => this.drawn(),
    }, (state, message) => this.linked(state, message));
  }

  linked(state, message) {
    const ended = this.head && DONE.includes(this.head.status);
    this.setLink(state === "live" && ended ? "" : state, message);
    if (state === "lost" && !this.head) this.explain();
  }

  async explain() {
    try {
      await get(runPath(this.run));
      if (this.selection.task) this.set({ task: null });
    } catch (error) {
      if (error.status === 404) {
        this.live.close();
        this.setLink("");
        replace(this.element, h("div.notice", h("h1", "No such run"), h("p", error.message), h("a", { href: "#/" }, "All runs")));
      }
    }
  }

  showHead(head) {
    const before = this.head?.status;
    this.head = head;
    document.title = `${head.name || head.run_id}: ${words(head.status)}`;
    replace(this.title, head.name || head.run_id);
    this.tick();
    replace(this.actions,
      RESUMABLE.includes(head.status) && button("Resume…", () => resumeRun(this.run, false), { class: "primary" }),
      (head.status === "failed" || (head.counts.failed && RESUMABLE.includes(head.status))) && button("Retry failed…", () => resumeRun(this.run, true), { class: head.status === "failed" ? "primary" : "" }),
      !DONE.includes(head.status) && button("Cancel…", () => cancelRun(this.run)));
    replace(this.bar, progress(head));
    if (before && before !== head.status) replace(this.told, `The run is ${words(head.status)}.`);
  }

  tick() {
    const head = this.head;
    const paused = head.throttled.map((one) => `${one.backend} ${one.until ? `paused until ${clock(one.until)}` : "slowed"} after ${one.cause}, ${one.slots} of ${one.total} slots`);
    replace(this.facts, status(head.status), head.reason && h("span.why", head.reason),
      [`${count(head.done)} of ${count(head.total)} tasks ended`, elapsed(head.started_at, head.ended_at),
        cost(head.cost_usd, head.cost_is_partial), head.input_tokens + head.output_tokens > 0 && `${tokens(head.input_tokens)} in, ${tokens(head.output_tokens)} out`,
        owner(head), ...paused].filter(Boolean).map((text) => h("span", text)),
      h("code.id", head.run_id));
    if (this.view === "list") this.list.draw();
  }

  turn(view) {
    this.view = view;
    const focused = this.tabs.contains(document.activeElement);
    replace(this.tabs, Object.entries(VIEWS).map(([name, title]) => h("button", {
      type: "button", role: "tab", "aria-selected": String(name === view), tabindex: name === view ? "0" : "-1",
      onclick: () => this.set({ view: name }) }, title)));
    if (focused) this.tabs.querySelector("[aria-selected=true]").focus();
    replace(this.views, this[view].element);
    if (view === "list" && this.selection.task) requestAnimationFrame(() => this.list.reveal(this.selection.task));
  }

  pressTab(event) {
    const names = Object.keys(VIEWS);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    this.set({ view: names[(names.indexOf(this.view) + step + names.length) % names.length] });
  }

  openGroup(name) {
    this.selection.toggle(name, true);
    this.set({ view: "list" });
  }

  drawn() {
    const row = this.selection.rows.get(this.selection.task);
    if (row && this.panel?.task) this.panel.showWhy(row.wait_kind === "question" ? "" : row.wait);
    this.selection.lay();
    this.draw();
  }

  draw() {
    const { selection } = this;
    const chips = STATUSES.filter((name) => selection.counts[name] || selection.statuses.has(name));
    const face = JSON.stringify([chips.map((name) => selection.counts[name]), [...selection.statuses]]);
    if (face !== this.chipFace) {
      this.chipFace = face;
      const focused = [...this.chips.children].findIndex((one) => one === document.activeElement);
      replace(this.chips, chips.map((name) => h("button", {
        type: "button", class: "chip", "aria-pressed": String(selection.statuses.has(name)),
        onclick: () => this.toggle(name) }, icon(name), `${words(name)} ${count(selection.counts[name] || 0)}`)));
      if (focused >= 0) this.chips.children[focused]?.focus();
    }
    this[this.view].show(selection, this.head);
  }

  toggle(name) {
    const chosen = new Set(this.selection.statuses);
    if (!chosen.delete(name)) chosen.add(name);
    this.set({ status: [...chosen] });
  }
}
