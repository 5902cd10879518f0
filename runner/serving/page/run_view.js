// A run: its state and actions, and its tasks in three views of one selection, the chosen task beside them.

import { cancelRun, resumeRun, retryTask, steerRun } from "./dialogs.js";
import { addressOf, button, chips, cost, count, elapsed, fact, h, inOut, owner, progress, replace, RESUMABLE, status, time, words } from "./dom.js";
import { Live } from "./page_api.js";
import { GraphView, ResultTable, Selection, STATUSES, Timeline } from "./task_views.js";
import { TaskPanel } from "./task_panel.js";

const VIEWS = ["table", "timeline", "graph"];
const DONE = ["completed", "failed", "cancelled"];

export class RunPage {
	selection = new Selection();
	title = h("h1", "Run");
	facts = h("div.facts");
	actions = h("div.actions");
	bar = h("div.wide-bar");
	chips = h("div.chips", { role: "group", label: "Status of the tasks" });
	told = h("p.sr", { role: "status" });
	views = h("div.view", { role: "tabpanel", label: "Tasks" });
	side = h("div.side");

	constructor(run, setLink) {
		Object.assign(this, { run, setLink });
		this.tabs = h("div.tabs", { role: "tablist", label: "View", onkeydown: (event) => this.pressTab(event) });
		this.find = h("input", { type: "search", placeholder: "Find a task", label: "Find tasks by id", oninput: () => this.set({ find: this.find.value }) });
		const pick = (task) => this.set({ task });
		const toggle = (name, open) => (this.selection.toggle(name, open), this.draw());
		const open = (line) => line && (line.row ? pick(line.row.id) : toggle(line.group.name));
		this.table = new ResultTable(run, open);
		this.timeline = new Timeline(open, toggle);
		this.graph = new GraphView(run, pick, (name) => (this.table.chosen = name, this.set({ view: "table" })));
		this.element = h("section.run",
			h("div.head", h("div.titles", this.title, this.facts), this.actions), this.bar,
			h("div.tools", this.tabs, this.find, this.chips), this.told,
			h("div.split", this.views, this.side));
		this.timer = setInterval(() => document.hidden || !this.head || DONE.includes(this.head.status) || this.tick(), 1000);
	}

	close() {
		clearInterval(this.timer);
		this.live.close();
	}

	/** Show the part of the run that the address names: `run/ID/task/TASK?view=…&status=…&find=…`. */
	navigate([, , , task = null], query) {
		const { selection } = this;
		this.address = location.hash;
		selection.statuses = new Set(query.getAll("status"));
		selection.find = (query.get("find") || "").toLowerCase();
		if (document.activeElement !== this.find) this.find.value = query.get("find") || "";
		this.wanted = VIEWS.find((one) => one === query.get("view"));
		const isMoved = task !== selection.task || !this.live;
		selection.task = task;
		selection.lay();
		if (isMoved) {
			this.choose(task);
			this.follow();
		}
		this.draw();
	}

	set({ task = this.selection.task, view = this.wanted, statuses = this.selection.statuses, find = this.find.value }) {
		const query = new URLSearchParams();
		if (view) query.set("view", view);
		for (const one of statuses) query.append("status", one);
		if (find) query.set("find", find);
		location.hash = addressOf(this.run, task) + (query.size ? `?${query}` : "");
	}

	choose(task) {
		const isFocused = this.side.contains(document.activeElement);
		const retry = (id) => ([...DONE, ...RESUMABLE].includes(this.head.status) ? resumeRun(this.run, true) : retryTask(this.run, id));
		this.panel = task && new TaskPanel(this.run, () => this.set({ task: null }), retry);
		replace(this.side, this.panel?.element);
		this.element.classList.toggle("with-task", Boolean(task));
		if (!task && isFocused) this[this.view].list?.focus({ preventScroll: true });
	}

	follow() {
		this.live?.close();
		this.live = new Live(this.run, this.selection.task, {
			opened: () => this.panel && (this.panel.activity = []),
			run: (head) => this.showHead(head),
			rows: ({ rows }) => this.selection.merge(rows),
			task: (detail) => this.panel.show(detail),
			activity: ({ entries }) => this.panel.showActivity(entries),
			drawn: () => this.drawn(),
		}, (state, message, status) => {
			const isWhole = this.selection.rows.size >= this.head?.total;
			this.setLink(state !== "live" ? state : !isWhole ? "reading" : DONE.includes(this.head.status) ? "" : state, message);
			if (status === 404) this.showMissing(message);
		});
	}

	/** There is no stream: no such task, or no such run. */
	showMissing(message) {
		if (location.hash !== this.address) return; // the reader has gone elsewhere
		if (this.selection.task) return this.set({ task: null });
		this.live.close();
		this.setLink("");
		replace(this.element, h("div.notice", h("h1", "No such run"), h("p", message), h("a", { href: "#/" }, "All runs")));
	}

	showHead(head) {
		const before = this.head?.status;
		this.head = head;
		this.selection.origin = time(head.created_at);
		const name = head.name || head.run_id;
		document.title = `${name}: ${words(head.status)}`;
		replace(this.title, name);
		this.tick();
		const [isFailed, isResumable] = [head.status === "failed", RESUMABLE.includes(head.status)];
		replace(this.actions,
			isResumable && button("Resume…", () => resumeRun(this.run), { class: "primary" }),
			(isFailed || (isResumable && head.counts.failed)) && button("Retry failed…", () => resumeRun(this.run, true), { class: isFailed && "primary" }),
			![...DONE, "cancelling"].includes(head.status) && button("Pause or concurrency…", () => steerRun(this.run)),
			!DONE.includes(head.status) && button("Cancel…", () => cancelRun(this.run)));
		replace(this.bar, progress(head));
		if (before && before !== head.status) replace(this.told, `The run is ${words(head.status)}.`);
	}

	tick() {
		const { head } = this;
		replace(this.facts, status(head.status), head.reason && h("span.why", head.reason),
			[`${count(head.done)} of ${count(head.total)} tasks ended`, elapsed(head), cost(head), inOut(head), owner(head), ...head.throttled]
				.map(fact),
			h("code.id", head.run_id));
		this[this.view]?.reveal && this[this.view].draw();
	}

	turn(view) {
		this.view = view;
		const isFocused = this.tabs.contains(document.activeElement);
		replace(this.tabs, VIEWS.map((name) => button(name[0].toUpperCase() + name.slice(1), () => this.set({ view: name }),
			{ role: "tab", "aria-selected": String(name === view), tabindex: name === view ? 0 : -1 })));
		if (isFocused) this.tabs.querySelector("[aria-selected=true]").focus();
		replace(this.views, this[view].element);
		if (this[view].reveal && this.selection.task) requestAnimationFrame(() => this[view].reveal(this.selection.task));
	}

	pressTab(event) {
		const step = { ArrowRight: 1, ArrowLeft: VIEWS.length - 1 }[event.key];
		if (step) this.set({ view: VIEWS[(VIEWS.indexOf(this.view) + step) % VIEWS.length] });
	}

	drawn() {
		this.panel?.showWhy(this.selection.rows);
		this.selection.lay();
		this.draw();
	}

	draw() {
		const { counts, statuses } = this.selection;
		const shown = STATUSES.filter((name) => counts[name] || statuses.has(name));
		const face = JSON.stringify([shown.map((name) => counts[name]), [...statuses]]);
		if (face !== this.chipFace) {
			this.chipFace = face;
			const focused = [...this.chips.children].indexOf(document.activeElement);
			replace(this.chips, chips(shown, statuses, (chosen) => this.set({ statuses: chosen }), counts));
			this.chips.children[focused]?.focus();
		}
		const view = this.wanted || "table";
		if (view !== this.view) this.turn(view);
		this[view].show(this.selection, this.head);
	}
}
