// The parts of a `for_each` as a table: item, answer, status, time, tokens, cost. It scrolls as the list does.

import { button, cost, h, icon, replace, seconds, tokens, words } from "./dom.js";
import { download } from "./page_api.js";
import { TaskList } from "./row_list.js";
import { noteOf, STATUSES } from "./selection.js";

const { compare } = new Intl.Collator("en", { numeric: true });
const MOST_FIELDS = 12; // columns of a structured answer
const SAMPLE = 500; // parts whose answers name the columns
const isFields = (answer) => answer?.constructor === Object;
const cell = (value) => (value === undefined || value === null ? "" : String(value));

export class ResultTable extends TaskList {
	heads = h("div.line.heads", { role: "row", "aria-rowindex": 1 });
	bar = h("div.facts");

	constructor(run, onopen, choose) {
		super(onopen, () => {});
		Object.assign(this, { run, choose });
		this.list.setAttribute("role", "grid");
		this.list.setAttribute("aria-label", "Results");
		this.list.prepend(this.heads);
		this.element = h("div.results", this.bar, this.list);
	}

	get lines() {
		return this.rows;
	}

	show(selection) {
		const groups = [...selection.groups.values()].sort((one, other) => other.parts.length - one.parts.length);
		const name = this.chosen || groups[0]?.name || this.name;
		const parts = selection.groups.get(name)?.parts || [];
		const fields = new Set();
		for (const { answer } of parts.slice(0, SAMPLE)) if (isFields(answer) && fields.size < MOST_FIELDS) for (const field of Object.keys(answer)) fields.add(field);
		const answers = fields.size
			? [...fields].map((field) => [field, ({ answer }) => (isFields(answer) ? answer[field] : undefined)])
			: [["Answer", ({ answer }) => (isFields(answer) ? JSON.stringify(answer) : answer)]];
		this.columns = [
			["Item", ({ item, id }) => item || id], ...answers,
			["Status", ({ status }) => STATUSES.indexOf(status)], ["Time", (row) => selection.took(row)],
			["Tokens", (row) => row.tokens], ["Cost", (row) => row.cost_usd],
		];
		this.count = answers.length;
		this.rows = this.sorted(parts).map((row) => (row.line ||= { row, level: 0 }));
		const face = JSON.stringify([this.columns.map(([title]) => title), this.by, this.down, name, groups.map((one) => one.name), [...selection.statuses]]);
		if (face !== this.face) {
			Object.assign(this, { face, name });
			this.drawHeads(selection, groups);
		}
		super.show(selection);
	}

	sorted(parts) {
		const [, value] = this.columns.find(([title]) => title === this.by) || [];
		if (!value) return parts;
		const isNone = (one) => one === undefined || one === null || Number.isNaN(one);
		const order = (one, other) => isNone(one) - isNone(other) || (isNone(one) ? 0 : (this.down ? -1 : 1) * (typeof one === "number" && typeof other === "number" ? one - other : compare(one, other)));
		return parts.map((row) => [value(row), row]).sort(([one], [other]) => order(one, other)).map(([, row]) => row);
	}

	drawHeads(selection, groups) {
		const isFocused = [...this.heads.children].findIndex((one) => one.contains(document.activeElement));
		const columns = `minmax(120px, 2fr) repeat(${this.count}, minmax(90px, ${Math.max(1, 4 / this.count)}fr)) 120px 70px 60px 76px`;
		this.list.style.setProperty("--columns", columns);
		this.list.style.setProperty("--least", `${450 + 98 * this.count}px`);
		replace(this.heads, this.columns.map(([title]) =>
			h("span", { role: "columnheader", "aria-sort": title !== this.by ? "none" : this.down ? "descending" : "ascending" },
				button([title, title === this.by && (this.down ? " ▾" : " ▴")], () => this.sort(title), { class: "quiet" }))));
		this.heads.children[isFocused]?.firstChild.focus();
		const failed = selection.statuses.size === 1 && selection.statuses.has("failed");
		const save = (format) => () => download(`/page/runs/${encodeURIComponent(this.run)}/rows?format=${format}&group=${encodeURIComponent(this.name)}`, `${this.name}.${format}`);
		replace(this.bar,
			groups.length > 1 ? h("select", { label: "Table", onchange: ({ target }) => (this.chosen = target.value, this.show(selection)) }, groups.map(({ name }) => h("option", { value: name, selected: name === this.name }, name))) : h("b", this.name),
			button("Only failed", () => this.choose(failed ? [] : ["failed"]), { class: "chip", "aria-pressed": String(failed) }),
			button("Download CSV", save("csv")), button("JSON Lines", save("jsonl")));
	}

	sort(title) {
		this.down = this.by === title && !this.down;
		this.by = title;
		this.show(this.selection);
	}

	cellsOf({ row }, took) {
		const answers = this.columns.slice(1, -4).map(([, value]) => ["c-note", cell(value(row))]);
		if (!row.answer && noteOf(row)) answers[0] = ["c-note", noteOf(row)];
		return [["c-id", h("span.name", row.item || row.id)], ...answers, ["c-state", icon(row.status), " ", words(row.status)],
			["c-num", seconds(took)], ["c-num", tokens(row.tokens)], ["c-num", cost(row)]];
	}
}
