// The tasks of a run with the one selection that the list, the timeline and the graph show: filter, groups, task.

import { clean } from "./dom.js";

const FOLDED_FROM = 11;
const MOST_URGENT = 10; // parts that a folded group shows
const URGENT = ["failed", "waiting_input", "running"];

export class Selection {
  constructor() {
    this.rows = new Map();
    this.statuses = new Set();
    this.find = "";
    this.task = null;
    this.opened = new Map();
    this.lines = [];
  }

  /** Take rows of the server. With `reset` they are the first of all rows. */
  merge({ reset, rows }) {
    if (reset) this.rows = new Map();
    for (const row of rows) this.rows.set(row.id, row);
    this.lay();
  }

  get filtered() {
    return this.statuses.size > 0 || this.find !== "";
  }

  fits(row) {
    return (
      (!this.statuses.size || this.statuses.has(row.status)) &&
      (!this.find || row.id.toLowerCase().includes(this.find) || (row.item || "").toLowerCase().includes(this.find))
    );
  }

  isOpen(name, size) {
    return this.opened.get(name) ?? (this.filtered || size < FOLDED_FROM);
  }

  toggle(name, open) {
    const group = this.groups.get(name);
    this.opened.set(name, open ?? !this.isOpen(name, group.length));
    this.lay();
  }

  /** Lay the fitting tasks out in lines: tasks, and groups with their parts if open. */
  lay() {
    const all = [...this.rows.values()].sort((one, other) => one.position - other.position);
    this.all = all;
    this.counts = {};
    for (const row of all) this.counts[row.status] = (this.counts[row.status] || 0) + 1;
    this.groups = new Map();
    for (const row of all)
      if (row.group && this.fits(row)) {
        if (!this.groups.has(row.group)) this.groups.set(row.group, []);
        this.groups.get(row.group).push(row);
      }
    for (const parts of this.groups.values()) parts.sort((one, other) => partNumber(one.id) - partNumber(other.id));
    this.lines = [];
    const placed = new Set();
    for (const row of all) {
      if (row.group && this.groups.has(row.group)) {
        if (placed.has(row.group)) continue;
        placed.add(row.group);
        this.placeGroup(row.group);
      } else if (this.fits(row) && !(this.groups.has(row.id) && placed.has(row.id))) {
        this.lines.push({ row, level: 0 });
        if (this.groups.has(row.id) && !placed.has(row.id)) {
          placed.add(row.id);
          this.placeGroup(row.id);
        }
      }
    }
    this.version = (this.version || 0) + 1;
  }

  placeGroup(name) {
    const parts = this.groups.get(name);
    const open = this.isOpen(name, parts.length);
    this.lines.push({ group: name, parts, open, level: 0, state: groupStatus(parts) });
    const shown = open ? parts : parts.filter((row) => row.status === "failed" || row.status === "waiting_input").slice(0, MOST_URGENT);
    for (const row of shown) this.lines.push({ row, level: 1 });
  }

  lineOf(task) {
    return this.lines.findIndex((line) => line.row?.id === task);
  }
}

const partNumber = (id) => Number(id.slice(id.lastIndexOf(".") + 1));

export function groupStatus(parts) {
  const there = new Set(parts.map((row) => row.status));
  return URGENT.find((status) => there.has(status)) || ["pending", "cancelled", "skipped", "completed"].find((status) => there.has(status)) || "pending";
}

/** Return what a list says beside the status of a task: its error, question, or the reason for which it waits. */
export function noteOf(row) {
  if (row.damaged) return "the stored result is damaged";
  if (row.question) return clean(row.question);
  const error = row.error ? `${row.error_kind}: ${row.error}` : "";
  return clean([error, row.wait].filter(Boolean).join("; "));
}
