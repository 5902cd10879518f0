// The tasks of a run with the selection that all views show: filter, groups, task.

import { count, plural, words } from "./dom.js";

const FOLDED_FROM = 11;
/** The most urgent first: the first that a group has is its status. */
export const STATUSES = ["failed", "waiting_input", "running", "pending", "cancelled", "skipped", "completed"];

class Group {
	parts = [];
	counts = {};
	tokens = 0;

	constructor(name) {
		this.name = name;
	}

	add(row) {
		this.parts.push(row);
		this.counts[row.status] = (this.counts[row.status] || 0) + 1;
		this.tokens += row.tokens || 0;
		if (row.cost_usd !== undefined) this.cost_usd = (this.cost_usd || 0) + row.cost_usd;
	}

	get status() {
		return STATUSES.find((status) => this.counts[status]);
	}
}

export function groupsOf(rows) {
	const groups = new Map();
	for (const row of rows) {
		if (!row.group) continue;
		if (!groups.has(row.group)) groups.set(row.group, new Group(row.group));
		groups.get(row.group).add(row);
	}
	return groups;
}

export class Selection {
	all = []; // rows by position
	rows = new Map(); // rows by id
	statuses = new Set();
	find = "";
	task = null;
	opened = new Map(); // whether a person has opened or folded a group, by its name
	origin = NaN; // the creation of the run; times of rows are milliseconds since then

	merge(rows) {
		for (const row of rows) {
			this.all[row.position] = row;
			this.rows.set(row.id, row);
		}
	}

	get now() {
		return Date.now() - this.origin;
	}

	took({ status, start, took }) {
		return status === "running" ? Math.floor((this.now - start) / 1000) : took / 1000;
	}

	get filtered() {
		return this.statuses.size > 0 || this.find !== "";
	}

	fits(row) {
		const isChosen = !this.statuses.size || this.statuses.has(row.status);
		return isChosen && `${row.id}\n${row.item || ""}\n${this.find && row.answer ? JSON.stringify(row.answer) : ""}`.toLowerCase().includes(this.find);
	}

	isOpen(group) {
		return this.opened.get(group.name) ?? (this.filtered || group.parts.length < FOLDED_FROM);
	}

	toggle(name, open) {
		this.opened.set(name, open ?? !this.isOpen(this.groups.get(name)));
		this.lay();
	}

	/** Lay the fitting tasks out in lines. */
	lay() {
		this.counts = {};
		for (const row of this.all) this.counts[row.status] = (this.counts[row.status] || 0) + 1;
		this.fitting = this.filtered ? this.all.filter((row) => this.fits(row)) : this.all;
		this.groups = groupsOf(this.fitting);
		this.lines = [];
		const placed = new Set();
		for (const row of this.fitting) {
			const group = this.groups.get(row.group || row.id);
			const isPlaced = group && placed.has(group.name);
			if (!row.group && !isPlaced) this.lines.push({ row, level: 0 });
			if (!group || isPlaced) continue;
			placed.add(group.name);
			const open = this.isOpen(group);
			this.lines.push({ group, open, level: 0 });
			if (open) for (const part of group.parts) this.lines.push({ row: part, level: 1 });
		}
	}
}

/** The error or question of a task, and the reason for which it waits. */
export const noteOf = ({ note, wait }) => [note, wait].filter(Boolean).join("; ");

export const countsOf = ({ parts, counts }) =>
	`${plural(parts.length, "part")}: ${Object.entries(counts).map(([status, number]) => `${count(number)} ${words(status)}`).join(", ")}`;
