// The list of runs.

import { resumeRun } from "./dialogs.js";
import { addressOf, button, chips, clock, cost, count, elapsed, h, replace, RESUMABLE, SHAPES, status, tokens, words } from "./dom.js";
import { get, poll } from "./page_api.js";

const LIMIT = 50;
const STATUSES = ["running", "waiting_input", "parked", "interrupted", "failed", "queued", "completed", "cancelled"];

export function progress(run) {
	const shown = Object.keys(SHAPES).filter((name) => run.counts[name]);
	const told = shown.map((name) => `${count(run.counts[name])} ${words(name)}`).join(", ");
	const parts = shown.map((name) => h(`span.${name}`, { status: name }));
	parts.forEach((part, n) => (part.style.flexGrow = run.counts[shown[n]]));
	return h("span.bar", { role: "img", label: told, title: told }, parts);
}

export const owner = (run) => run.owner && `process ${run.owner.pid} on ${run.owner.host}`;

export class RunsPage {
	chips = h("div.chips", { role: "group", label: "Status" });
	body = h("tbody");
	foot = h("div.pager");
	note = h("p.empty", { hidden: true });

	constructor(setLink) {
		this.search = h("input", {
			type: "search", placeholder: "Search name or id", label: "Search runs by name or id",
			oninput: () => {
				const { value } = this.search;
				clearTimeout(this.typing);
				this.typing = setTimeout(() => this.choose("search", [value]), 200);
			},
		});
		this.element = h("section.runs", h("h1.sr", "Runs"), h("div.tools", this.search, this.chips),
			h("div.scroll", h("table",
				h("thead", h("tr", ["Run", "Status", "Progress", "Cost", "Tokens", "Time", "Owner"].map((title) => h("th", { scope: "col", class: `c-${title.toLowerCase()}` }, title)))),
				this.body)),
			this.note, this.foot);
		this.polling = poll(() => this.load(), setLink);
	}

	close() {
		clearTimeout(this.typing);
		this.polling.end();
	}

	navigate(_parts, query) {
		this.query = query;
		this.page = Number(query.get("page") || 0);
		if (document.activeElement !== this.search) this.search.value = query.get("search") || "";
		replace(this.chips, chips(STATUSES, new Set(query.getAll("status")), (chosen) => this.choose("status", chosen)));
		this.polling.now();
	}

	choose(field, values) {
		const query = new URLSearchParams(this.query);
		query.delete("page");
		query.delete(field);
		for (const one of values) if (one) query.append(field, one);
		location.hash = `#/?${query}`;
	}

	async load() {
		const asked = this.query;
		const query = new URLSearchParams(asked);
		query.delete("page");
		query.set("limit", LIMIT + 1);
		query.set("offset", this.page * LIMIT);
		const { runs } = await get(`/api/runs?${query}`);
		if (asked === this.query) this.draw(runs.slice(0, LIMIT), runs.length > LIMIT);
	}

	draw(runs, more) {
		const text = JSON.stringify([runs, more, runs.map(elapsed)]);
		if (text === this.drawn) return;
		this.drawn = text;
		const focused = this.body.contains(document.activeElement) && document.activeElement.hash;
		replace(this.body, runs.map((run) => this.row(run)));
		if (focused) [...this.body.querySelectorAll("a")].find((one) => one.hash === focused)?.focus();
		this.note.hidden = runs.length > 0;
		replace(this.note, this.query.size ? "No run fits." : ["No runs yet. ", h("code", "plait run PLAN"), " makes one."]);
		replace(this.foot,
			(this.page > 0 || more) && [
				button("← Newer", () => this.choose("page", [this.page - 1]), { disabled: this.page === 0 }),
				h("span", `${count(this.page * LIMIT + 1)}–${count(this.page * LIMIT + runs.length)}`),
				button("Older →", () => this.choose("page", [this.page + 1]), { disabled: !more }),
			]);
	}

	row(run) {
		const href = addressOf(run.run_id);
		return h("tr", { onclick: (event) => event.target.closest("a, button") || (location.hash = href) },
			h("td.c-run", h("a", { href }, run.name || run.run_id),
				h("span.id", `${run.run_id} · ${clock(run.created_at)}`)),
			h("td.c-status", status(run.status), run.reason && h("span.why", run.reason),
				RESUMABLE.includes(run.status) && button("Resume…", () => resumeRun(run.run_id))),
			h("td.c-progress", progress(run), h("span.of", `${count(run.done)} of ${count(run.total)}`)),
			h("td.c-cost", cost(run)),
			h("td.c-tokens", tokens(run.input_tokens + run.output_tokens)),
			h("td.c-time", elapsed(run)),
			h("td.c-owner", owner(run)));
	}
}
