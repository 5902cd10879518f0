// The page: sign-in, the head with its places, the list of runs, and the place that the address names.

import { QuestionsPage, resumeRun } from "./dialogs.js";
import { addressOf, button, chips, clock, cost, count, elapsed, h, owner, progress, replace, RESUMABLE, status, tokens } from "./dom.js";
import { get, poll, post } from "./page_api.js";
import { RunPage } from "./run_view.js";

const LIMIT = 50;
const STATUSES = ["running", "waiting_input", "parked", "interrupted", "failed", "queued", "completed", "cancelled"];

class RunsPage {
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

let place = null;
let placeKey = "";
const [main, badge, link] = ["main", ".badge", ".link"].map((one) => document.querySelector(one));
const [runs, questions] = document.querySelectorAll("nav a");

function show() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
	const parts = path.split("/").filter(Boolean).map(decoded);
	const name = ["run", "questions"].find((one) => one === parts[0]) || "runs";
	for (const [of, anchor] of Object.entries({ runs, questions })) anchor.setAttribute("aria-current", of === name ? "page" : name === "run" && of === "runs");
	const key = name === "run" ? `run/${parts[1]}` : name;
	if (key !== placeKey) {
		place?.close?.();
		placeKey = key;
		setLink("");
		document.title = "plait";
		place = { run: () => new RunPage(parts[1], setLink), questions: () => new QuestionsPage(polling.now), runs: () => new RunsPage(setLink) }[name]();
		replace(main, place.element);
	}
	place.navigate(parts, new URLSearchParams(query));
}

function decoded(part) {
	try {
		return decodeURIComponent(part);
	} catch {
		return part;
	}
}

function setLink(state, message) {
	link.className = `link ${state}`;
	replace(link, state === "lost" ? message || "connection lost; trying again" : state);
}

async function readQuestions() {
	if (!place) return;
	const { questions } = await get("/api/questions");
	badge.hidden = !questions.length;
	replace(badge, questions.length);
	if (place instanceof QuestionsPage) place.draw(questions);
}

const polling = poll(readQuestions, (...state) => place instanceof QuestionsPage && setLink(...state));

function signedOut(message) {
	place?.close?.();
	place = null;
	placeKey = "";
	replace(main, h("section.notice", h("h1", "Not signed in"), h("p", `${message}; run \`plait ui\` on the same store, and open the address that it prints.`), button("Try again", start)));
}

/** Redeem the code of the address, if there is one, and show the place. */
async function start() {
	const code = location.hash.slice(1);
	if (code && !code.startsWith("/")) {
		history.replaceState(null, "", "#/");
		try {
			localStorage.token = (await post("/page/sign-in", { code })).token;
		} catch (error) {
			if (!(await get("/api/runs?limit=1").catch(() => null))) return signedOut(error.message);
		}
	}
	if (!localStorage.token) return signedOut("This browser has not signed in to this server");
	show();
	polling.now();
}

window.addEventListener("signed-out", () => signedOut("The server was restarted after this browser signed in"));
window.addEventListener("hashchange", () => (/^#[^/]/.test(location.hash) ? start() : show()));
start();
