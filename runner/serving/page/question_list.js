// The questions to a person over all runs, each with its form.

import { Field, working } from "./dialogs.js";
import { addressOf, clock, h, linked, replace, RESUMABLE, seconds, time } from "./dom.js";
import { post, runPath, taskPath } from "./page_api.js";

/** Return the form of a question; `done` receives what was done with it, and the status of the run. */
export function questionForm(question, done) {
	const path = taskPath(question.run_id, question.task_id);
	const said = h("div.ask", linked(question.question));
	const error = h("div");
	if (!question.asks) return decisionForm(path, said, error, done);
	const { schema, default: otherwise, deadline_at: deadline } = question.asks;
	const field = new Field(schema, otherwise, "Answer");
	const send = async () => {
		const { status } = await post(`${path}/answer`, { value: field.read(), attempt: question.attempt });
		await done("answered", status);
	};
	const answer = working("Answer", error, send, { class: "primary" });
	return h("form", { onsubmit: (event) => (event.preventDefault(), answer.click()) }, said,
		schema?.description && h("p.about", schema.description), field.element,
		h("div.actions", answer, h("span.about", termsOf(deadline, otherwise))), error);
}

function termsOf(deadline, otherwise) {
	const left = (time(deadline) - Date.now()) / 1000;
	const until = deadline && (left > 0 ? `until ${clock(deadline)}, in ${seconds(left)}` : `the deadline ${clock(deadline)} has passed`);
	return [until, (otherwise ?? null) !== null && `default ${typeof otherwise === "string" ? otherwise : JSON.stringify(otherwise)}`].filter(Boolean).join("; ");
}

function decisionForm(path, said, error, done) {
	const text = h("textarea", { rows: 2, label: "Result or reason" });
	const settle = (title, how, given) =>
		working(title, error, async () => {
			const { status } = await post(`${path}/settle`, { how, text: text.value });
			await done("settled", status);
		}, given);
	return h("div", said,
		h("p.about", "The process died while the task was running, and the task is marked at_most_once. Did it take effect?"), text,
		h("div.actions",
			settle("It did: complete with this result", "done"),
			settle("It did not: run it again", "again"),
			settle("Fail it for this reason", "fail", { class: "danger" })), error);
}

export class QuestionsPage {
	cards = new Map();
	list = h("div");
	empty = h("p.empty", { hidden: true }, "No task asks a person.");
	told = h("p.told", { role: "status" });
	element = h("section.narrow", h("h1", "Questions"), this.told, this.list, this.empty);

	constructor(read) {
		this.navigate = read;
	}

	/** A card that stays is not touched: a person may be writing in it. */
	draw(questions) {
		const before = this.cards;
		this.cards = new Map();
		for (const question of questions) {
			const key = JSON.stringify([question.run_id, question.task_id, question.attempt]);
			const card = before.get(key) || this.card(question);
			this.cards.set(key, card);
			if (!before.delete(key)) this.list.append(card);
		}
		for (const card of before.values()) card.remove();
		this.empty.hidden = questions.length > 0;
	}

	card(question) {
		const { run_id: run, task_id: task } = question;
		const answered = (...how) => (afterAnswer(this.told, question, ...how), this.navigate());
		return h("article.card",
			h("header", h("a", { href: addressOf(run, task) }, task), " in ", h("a", { href: addressOf(run) }, question.run_name || run), h("span.about", clock(question.since))),
			questionForm(question, answered));
	}
}

export function afterAnswer(place, { run_id: run, task_id: task }, how, status) {
	const resume = () => post(`${runPath(run)}/resume`).then(() => replace(place, `Run ${run} continues.`));
	replace(place, `${task} is ${how}. `, RESUMABLE.includes(status) && ["No process runs its run. ", working("Resume the run", place, resume)]);
}
