// One task in full: why it waits, its question, error, result, conversation, attempts, prompt and usage.

import { afterAnswer, continueTask, questionForm } from "./dialogs.js";
import { addressOf, button, clock, cost, count, fact, h, inOut, json, linked, replace, seconds, spelled, status, table, tokens } from "./dom.js";

const MOST_ACTIVITY = 1000;

export class TaskPanel {
	activity = [];
	title = h("h2");
	told = h("p.told", { role: "status" });
	head = h("div.facts");
	actions = h("div.actions");

	constructor(run, onclose, onretry) {
		Object.assign(this, { run, onretry });
		this.parts = Object.fromEntries(["why", "ask", "error", "sent", "result", "talk", "tries", "more"].map((name) => [name, h(`div.part-${name}`)]));
		const { why, ask, error, sent, result, talk, tries, more } = this.parts;
		this.element = h("aside.panel", { label: "Task", tabindex: "0", onkeydown: (event) => event.key === "Escape" && onclose() },
			h("header", this.title, button("✕", onclose, { label: "Close the task", class: "quiet" })),
			this.head, this.actions, this.told, why, ask, error, h("div.both", sent, result), talk, tries, more);
	}

	show(task) {
		this.task = task;
		replace(this.title, task.task_id);
		replace(this.head, status(task.status),
			[task.backend && `backend ${task.backend}`, task.model, seconds(task.duration_s), inOut(task), cost(task)]
				.map(fact));
		const talks = task.session_id && task.messages.some((one) => one.role !== "user") && !["waiting_input", "running"].includes(task.status);
		replace(this.actions, talks && button("Continue the conversation", () => continueTask(this.run, task.task_id)));
		this.showQuestion(task);
		const traceback = task.history.findLast((one) => one.traceback)?.traceback;
		this.showPart("error", "Error", task.error_kind && [
			h("div.callout.bad", h("b", task.error_kind), ": ", linked(task.error || "")),
			task.remedy && h("p.about", task.remedy),
			traceback && h("details", { open: true }, h("summary", "Traceback"), h("pre", traceback))]);
		this.showSent(task);
		this.showPart("result", "Result", task.damaged
			? h("p.callout.bad", "The stored result does not match its checksum. Retry failed tasks to run the task again.")
			: task.data !== null ? task.data?.constructor === Object ? values(task.data) : h("pre", json(task.data)) : task.text !== null && h("pre.text", linked(task.text)));
		this.showTalk();
		this.showPart("tries", "Attempts", task.history.length > 0 && table(["#", "Status", "Started", "Time", "Tokens", "Cost", "Error"],
			task.history.map((one) =>
				[one.attempt, one.moved_from ? `${one.status} by ${one.backend}` : one.status, clock(one.started_at), seconds(one.duration_s), tokens(one.input_tokens + one.output_tokens),
					cost(one), one.error_kind && `${one.error_kind}: ${one.error}`])));
		this.showMore(task);
	}

	/** Show what the task was asked with, beside what came. */
	showSent({ messages, rendered, prompt, attempts, spec: { system, output_schema: schema, aliases: _names, ...settings } }) {
		this.prompt = messages.findLast((one) => one.role === "user" && one.attempt === attempts);
		const sent = this.prompt?.content ?? rendered;
		const folded = (title, open, content) => content && h("details", { open }, h("summary", title), h("pre.text", content));
		this.showPart("sent", "Sent", [
			folded("System prompt", true, system), folded("Prompt", true, sent && linked(sent)), folded("Prompt template", !sent, prompt),
			values(settings),
			folded("Schema of the answer", false, schema && json(schema)),
		]);
	}

	/** Show why the task waits, and what can run again: the task, and those behind which it waits. */
	showWhy(rows) {
		if (!this.task) return;
		const { task_id: task, depends_on: before } = this.task;
		const wait = rows.get(task)?.wait;
		const again = [task, ...before].filter((id) => ((row) => row?.status === "failed" || (row?.status === "pending" && row.attempts))(rows.get(id)));
		const why = JSON.stringify([wait, again]);
		if (why === this.why) return;
		this.why = why;
		replace(this.parts.why, wait && h("p.callout", h("b", "Why it waits: "), wait), again.map((id) => button(`Retry ${id}…`, () => this.onretry(id))));
	}

	/** Once for each attempt: a person may be writing in the form. */
	showQuestion(task) {
		const attempt = task.status === "waiting_input" ? task.attempts : null;
		if (attempt === this.asked) return;
		this.asked = attempt;
		const question = { run_id: this.run, task_id: task.task_id, attempt, question: task.question || "", asks: task.asks };
		this.showPart("ask", "Question", attempt !== null && questionForm(question, (...how) => afterAnswer(this.told, question, ...how)));
	}

	showPart(name, title, content) {
		replace(this.parts[name], content && [h("h3", title), content]);
	}

	showActivity(entries) {
		this.activity = [...this.activity, ...entries].slice(-MOST_ACTIVITY);
		this.showTalk();
	}

	/** Show the messages by attempt but for the prompt sent last, with the output of agents, folded unless under way. */
	showTalk() {
		const { task, activity, element } = this;
		if (!task) return;
		const open = new Set([...this.parts.talk.querySelectorAll("details[open]")].map((one) => one.dataset.attempt));
		const attempts = new Set([...task.messages, ...activity].map((one) => one.attempt));
		if (task.status === "running") attempts.add(task.attempts);
		const order = [...attempts].sort((one, other) => (one || Infinity) - (other || Infinity)); // 0 is after the run
		const turns = order.map((attempt) => {
			const messages = task.messages.filter((one) => one.attempt === attempt && one !== this.prompt);
			const came = messages.findIndex((one) => one.role !== "user");
			const prompts = came < 0 ? messages : messages.slice(0, came);
			const output = activity.filter((one) => one.attempt === attempt);
			const ended = task.history.find((one) => one.attempt === attempt)?.status;
			const how = ended && !["completed", "running", "asked"].includes(ended) ? `, ${ended}` : "";
			return [
				(order.length > 1 || how) && h("h4", attempt ? `Attempt ${attempt}${how}` : "After the run"),
				prompts.map(message),
				activityOf(output, task.status === "running" && attempt === task.attempts, open.has(String(attempt)), attempt),
				messages.slice(prompts.length).map(message),
			];
		});
		const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
		this.showPart("talk", "Conversation", turns.length > 0 && turns);
		if (isAtEnd && task.status === "running") element.scrollTop = element.scrollHeight;
	}

	showMore(task) {
		const link = (id) => h("a", { href: addressOf(this.run, id) }, id);
		const facts = [
			["Depends on", task.depends_on.slice(0, 50).flatMap((id, n) => [n ? ", " : "", link(id)])],
			["Added by", task.added_by && link(task.added_by)],
			["Session", task.session_id && h("code", task.session_id)],
			...task.answers.map((one) => [`Answered by ${one.by}`, [one.question, " → ", textOf(one.value)]]),
		];
		const shown = facts.filter(([, value]) => value && value.length !== 0);
		this.showPart("more", "More", shown.length > 0 && pairs(shown));
	}
}

const pairs = (entries) => h("dl", entries.map(([name, value]) => [h("dt", name), h("dd", value)]));

const values = (object) => pairs(Object.entries(object).map(([name, value]) => [name, textOf(value)]));

const textOf = (value) => linked(spelled(value));

const message = ({ role, content, damaged }) =>
	h(`div.message.${role}`, h("span.role", role === "user" ? "prompt" : role), h("pre.text", damaged ? "(the stored message is damaged)" : linked(content)));

/** Return the output of an agent: texts run together, each tool in its own line. */
function activityOf(entries, isRunning, open, attempt) {
	if (!entries.length) return isRunning && h("p.about", "at work…");
	const lines = [];
	for (const one of entries) {
		const last = lines.at(-1);
		if (one.kind === "text" && last?.kind === "text") last.text += one.text;
		else lines.push({ ...one });
	}
	const body = lines.map(({ kind, text }) => (kind === "text" ? h("pre.text", linked(text)) : h(`div.step.${kind}`, h("span.role", kind), " ", text)));
	if (isRunning) return h("div.message.assistant", { "aria-busy": "true" }, h("span.role", "at work"), body);
	const tools = entries.filter((one) => one.kind !== "text").length;
	return h("details", { "data-attempt": attempt, open }, h("summary", tools ? `${count(tools)} steps of the agent` : "Output of the agent"), body);
}
