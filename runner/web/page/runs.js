// The list of runs.

import { get } from "./api.js";
import { button, h, icon, replace, status, words } from "./dom.js";
import { ago, clock, cost, count, elapsed, tokens } from "./format.js";

const LIMIT = 50;
const POLL_MS = 2000;
const STATUSES = ["running", "waiting_input", "interrupted", "failed", "queued", "completed", "cancelled"];
const ORDER = ["completed", "skipped", "running", "waiting_input", "failed", "cancelled", "pending"];

/** Return a bar with a part for each status. */
export function progress(run) {
  const bar = h("span.bar", { role: "img" });
  const told = [];
  for (const name of ORDER) {
    const number = run.counts[name];
    if (!number) continue;
    told.push(`${count(number)} ${words(name)}`);
    const part = h("span", { class: `b-${name}` });
    part.style.flexGrow = number;
    bar.append(part);
  }
  bar.setAttribute("aria-label", told.join(", "));
  bar.title = told.join(", ");
  return bar;
}

export function owner(run) {
  if (!run.owner) return "";
  const gone = run.owner.liveness === "dead" ? ", dead" : "";
  return `process ${run.owner.pid} on ${run.owner.host}${gone}`;
}

export class RunsPage {
  constructor(setLink) {
    this.setLink = setLink;
    this.page = 0;
    this.query = new URLSearchParams();
    this.search = h("input", {
      type: "search", placeholder: "Search name or id", "aria-label": "Search runs by name or id",
      oninput: () => this.choose("search", this.search.value),
    });
    this.chips = h("div.chips", { role: "group", "aria-label": "Status" });
    this.name = h("span");
    this.body = h("tbody");
    this.foot = h("div.pager");
    this.note = h("p.empty", { hidden: true });
    this.element = h("section.runs",
      h("h1.sr", "Runs"),
      h("div.tools", this.search, this.chips, this.name),
      h("div.scroll",
        h("table", h("thead", h("tr", {},
          ["Run", "Status", "Progress", "Cost", "Tokens", "Time", "Owner"].map((title) => h("th", { scope: "col", class: `c-${title.toLowerCase()}` }, title)))),
        this.body)),
      this.note, this.foot);
    this.timer = setInterval(() => document.hidden || this.load(), POLL_MS);
  }

  close() {
    clearInterval(this.timer);
    clearTimeout(this.typing);
    this.closed = true;
  }

  navigate(_parts, query) {
    this.query = query;
    this.page = Number(query.get("page") || 0);
    if (document.activeElement !== this.search) this.search.value = query.get("search") || "";
    const chosen = query.getAll("status");
    replace(this.chips, STATUSES.map((name) =>
      h("button", {
        type: "button", class: "chip", "aria-pressed": String(chosen.includes(name)),
        onclick: () => this.toggle(name),
      }, icon(name), words(name))));
    const named = query.get("name");
    replace(this.name, named && h("button", { type: "button", class: "chip", "aria-pressed": "true", title: "Show runs of all names", onclick: () => this.choose("name", "") }, `name: ${named} ✕`));
    this.load();
  }

  go(query) {
    const text = query.toString();
    location.hash = text ? `#/?${text}` : "#/";
  }

  toggle(name) {
    const query = new URLSearchParams(this.query);
    const chosen = new Set(query.getAll("status"));
    if (!chosen.delete(name)) chosen.add(name);
    query.delete("status");
    query.delete("page");
    for (const one of chosen) query.append("status", one);
    this.go(query);
  }

  choose(field, value) {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      const query = new URLSearchParams(this.query);
      query.delete("page");
      if (value) query.set(field, value);
      else query.delete(field);
      this.go(query);
    }, field === "search" ? 200 : 0);
  }

  async load() {
    const asked = (this.asked = (this.asked || 0) + 1);
    const query = new URLSearchParams(this.query);
    query.delete("page");
    query.set("limit", LIMIT + 1);
    query.set("offset", this.page * LIMIT);
    try {
      const { runs } = await get(`/api/runs?${query}`);
      if (this.closed || asked !== this.asked) return;
      this.setLink("live");
      this.draw(runs.slice(0, LIMIT), runs.length > LIMIT);
    } catch (error) {
      if (!this.closed && error.status !== 401) this.setLink("lost", error.message);
    }
  }

  draw(runs, more) {
    const text = JSON.stringify([runs, more]);
    if (text !== this.drawn) {
      this.drawn = text;
      const focused = this.body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      replace(this.body, runs.map((run) => this.row(run)));
      if (focused) [...this.body.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus();
      const chosen = [...this.query.keys()].some((name) => name !== "page");
      this.note.hidden = runs.length > 0;
      replace(this.note, chosen ? "No run fits." : ["No runs yet. ", h("code", "plait run PLAN"), " makes one."]);
      replace(this.foot,
        (this.page > 0 || more) && [
          button("← Newer", () => this.turn(-1), { disabled: this.page === 0 }),
          h("span", `${count(this.page * LIMIT + 1)}–${count(this.page * LIMIT + runs.length)}`),
          button("Older →", () => this.turn(1), { disabled: !more }),
        ]);
    } else {
      for (const cell of this.body.querySelectorAll("[data-from]"))
        replace(cell, elapsed(cell.dataset.from, cell.dataset.to));
    }
  }

  turn(step) {
    const query = new URLSearchParams(this.query);
    query.set("page", this.page + step);
    this.go(query);
  }

  row(run) {
    const href = `#/run/${encodeURIComponent(run.run_id)}`;
    return h("tr", { onclick: (event) => event.target.closest("a,button") || (location.hash = href) },
      h("td.c-run",
        h("a", { href }, run.name || run.run_id),
        h("span.id", run.run_id, " · ", h("span", { title: clock(run.created_at) }, ago(run.created_at)),
          run.name && h("button", { type: "button", class: "quiet", title: "Only runs of this name", onclick: () => this.choose("name", run.name) }, "same name"))),
      h("td.c-status", status(run.status), run.reason && h("span.why", { title: run.reason }, run.reason)),
      h("td.c-progress", progress(run), h("span.of", `${count(run.done)} of ${count(run.total)}`)),
      h("td.num.c-cost", cost(run.cost_usd, run.cost_is_partial)),
      h("td.num.c-tokens", tokens(run.input_tokens + run.output_tokens)),
      h("td.num.c-time", { "data-from": run.started_at, "data-to": run.ended_at }, elapsed(run.started_at, run.ended_at)),
      h("td.c-owner", owner(run)));
  }
}
