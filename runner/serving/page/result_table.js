// All tasks, or the parts of a `for_each`, as a table: item, answer, status, time, tokens, cost.

import { button, cost, h, icon, replace, seconds, tokens, words } from "./dom.js";
import { download } from "./page_api.js";
import { TaskList } from "./row_list.js";
import { countsOf, noteOf, STATUSES } from "./selection.js";

const { compare } = new Intl.Collator("en", { numeric: true });
const FEW = 10; // parts that are shown among all tasks
const MOST_FIELDS = 12; // columns of a structured answer
const SAMPLE = 500; // parts whose answers name the columns
const isFields = (answer) => answer?.constructor === Object;
const cell = (value) => (value === undefined || value === null ? "" : String(value));

export class ResultTable extends TaskList {
	bar = h("div.facts");
	told = h("span");

	constructor(run, onopen, choose) {
		super("grid", "Results", onopen);
		Object.assign(this, { run, choose });
		this.element = h("div.results", this.bar, this.list);
	}

	show(selection) {
		const groups = [...selection.groups.values()].sort((one, other) => other.parts.length - one.parts.length);
		const many = groups[0]?.parts.length;
		if (many > FEW && 2 * many >= selection.all.length) this.largest ||= groups[0].name;
		const name = this.chosen ?? this.largest ?? "";
		const parts = name ? selection.groups.get(name)?.parts || [] : selection.fitting;
		const fields = new Set();
		for (const { answer } of name || !groups.length ? parts.slice(0, SAMPLE) : []) if (isFields(answer) && fields.size < MOST_FIELDS) for (const field of Object.keys(answer)) fields.add(field);
		const answers = fields.size
			? [...fields].map((field) => [field, ({ answer }) => (isFields(answer) ? answer[field] : undefined)])
			: [["Answer", ({ answer }) => (isFields(answer) ? Object.entries(answer).map((pair) => pair.map(cell).join(": ")).join(", ") : answer)]];
		this.columns = [
			[name ? "Item" : "Task", ({ item, id }) => (name && item) || id], ...answers,
			["Status", ({ status }) => STATUSES.indexOf(status)], ["Time", (row) => selection.took(row)],
			["Tokens", (row) => row.tokens], ["Cost", (row) => row.cost_usd],
		];
		this.count = answers.length;
		replace(this.told, selection.groups.has(name) && countsOf(selection.groups.get(name)));
		const face = JSON.stringify([this.columns.map(([title]) => title), this.by, this.down, name, groups.map((one) => one.name), [...selection.statuses]]);
		if (face !== this.face) {
			Object.assign(this, { face, name });
			this.drawHeads(selection, groups);
		}
		super.show(selection, null, this.sorted(parts).map((row) => (row.line ||= { row, level: 0 })));
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
		const save = (format) => () => {
			const query = new URLSearchParams({ format, ...(this.name && { group: this.name }) });
			return download(`/page/runs/${encodeURIComponent(this.run)}/rows?${query}`, `${this.name || "tasks"}.${format}`);
		};
		replace(this.bar,
			(groups.length > 0 || this.name) && h("select", { label: "Table", onchange: ({ target }) => (this.chosen = target.value, this.show(selection)) },
				[...new Set(["", this.name, ...groups.map(({ name }) => name)])].map((name) => h("option", { value: name, selected: name === this.name }, name || "all tasks"))),
			button("Only failed", () => this.choose(failed ? [] : ["failed"]), { class: "chip", "aria-pressed": String(failed) }),
			button("Download CSV", save("csv")), button("JSON Lines", save("jsonl")), this.told);
	}

	sort(title) {
		this.down = this.by === title && !this.down;
		this.by = title;
		this.show(this.selection);
	}

	cellsOf({ row }, took) {
		const texts = this.columns.slice(1, -4).map(([, value]) => cell(value(row)));
		if (!isFields(row.answer)) texts[0] = cell(row.answer) || noteOf(row);
		return [["c-id", [h("span.name", (this.name && row.item) || row.id), !this.name && row.item && h("span.item", row.item)]], ...texts.map((text) => ["c-note", text, text]), ["c-state", [icon(row.status), " ", words(row.status), row.attempts > 1 && ` ${row.attempts}×`]],
			["c-num", seconds(took)], ["c-num", tokens(row.tokens)], ["c-num", cost(row)]];
	}
}
