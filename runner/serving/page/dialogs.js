// Dialogs: a decision before each change that cannot be undone or costs money; and the questions to a person.

import { addressOf, button, clock, count, h, json, linked, plural, replace, RESUMABLE, seconds, spelled, table, time } from "./dom.js";
import { get, post, runPath, taskPath } from "./page_api.js";

const MOST_STEPS = 200;

/**
 * Open a dialog with things to do, by their names; each closes it, or returns an element that takes the place of the content.
 * Returns a function that shows other content and other things to do.
 */
function dialog(title, content, doings, kind = "primary", leave = "Not now") {
	const [body, error] = [h("div"), h("div")];
	const box = h("dialog", { label: title, onclose: () => box.remove() }, h("h2", title), body, error);
	const take = (made) => (made instanceof Node ? show(made, {}) : box.close());
	const show = (content, doings, leave = "Close") =>
		replace(body, content, h("div.actions",
			Object.entries(doings).map(([name, go]) => working(name, error, () => go().then(take), { class: kind })), button(leave, () => box.close())));
	document.body.append(box);
	show(content, doings, leave);
	box.showModal();
	return show;
}

const alarm = (error) => h("p.error", { role: "alert" }, error.message);

/** Return a button that is disabled while `work` is under way, and shows in `place` what went wrong. */
export function working(text, place, work, given) {
	const made = button(text, async () => {
		made.disabled = true;
		replace(place);
		try {
			await work();
		} catch (error) {
			replace(place, alarm(error));
		}
		made.disabled = false;
	}, given);
	return made;
}

export const cancelRun = (run) =>
	dialog("Cancel the run?", h("p", "The run ends for good and cannot be resumed. Running tasks have a few seconds to end by themselves."),
		{ "Cancel the run": () => post(`${runPath(run)}/cancel`) }, "danger", "Keep it");

export function steerRun(run) {
	const [backend, number] = [h("input"), h("input", { type: "number", min: 1, max: 10000 })];
	const pause = (off) => () => post(`${runPath(run)}/pause`, { backend: backend.value || null, off });
	const tune = () => post(`${runPath(run)}/tune`, backend.value ? { limits: { [backend.value]: number.valueAsNumber } } : { concurrency: number.valueAsNumber });
	dialog("Pause or concurrency", [h("p", "Calls under way end normally."), h("label", "Backend, all if empty ", backend), h("label", " Tasks at once ", number)],
		{ "Pause it": pause(false), "Lift the pause": pause(true), "Change the concurrency": tune });
}

export const retryTask = (run, task) =>
	dialog(`Run ${task} again?`, h("p", "Tasks that wait for it continue after it."), { "Run it again": () => post(`${taskPath(run, task)}/retry`) });

export async function resumeRun(run, retryFailed = false) {
	const show = dialog(retryFailed ? "Retry failed tasks" : "Resume the run", h("p", "Reading what would run…"), {});
	const go = () => post(`${runPath(run)}/resume`, { retry_failed: retryFailed });
	const preview = await get(`${runPath(run)}/preview?retry_failed=${retryFailed}`).catch((refused) => void show(alarm(refused), {}));
	if (preview) show(previewOf(preview), preview.ended ? {} : { [retryFailed ? "Run them again" : "Resume"]: go }, preview.ended ? "Close" : "Not now");
}

function previewOf(preview) {
	if (preview.ended) return h("p", `The run is ${preview.status}; nothing is left to do.`);
	const all = Object.values(preview.tasks);
	const steps = all.filter((step) => step.action !== "keep");
	const kept = all.length - steps.length;
	return [
		h("p", `${plural(preview.runs, "task")} would run; ${plural(kept, "task")} kept${preview.adopted ? `; ${plural(preview.adopted, "agent")} still at work` : ""}.`),
		preview.possibly_billed_twice
			? h("p.warn", `${plural(preview.possibly_billed_twice, "task")} may be billed twice, about ${count(preview.repeated_input_tokens)} input tokens and the output before the interruption.`)
			: h("p", "Nothing is billed twice."),
		preview.damaged.length > 0 && h("p.warn", `The stored results of ${preview.damaged.slice(0, 5).join(", ")} are damaged and count as failed.`),
		h("div.steps", { tabindex: "0" }, table(["Task", "Action", "Reason"], steps.slice(0, MOST_STEPS).map((step) =>
			[step.task_id, h("b", step.action), [step.reason, step.possibly_billed_twice && h("em", " may be billed twice")]]))),
		steps.length > MOST_STEPS && h("p", `and ${count(steps.length - MOST_STEPS)} more`),
	];
}

export function continueTask(run, task) {
	const message = h("textarea", { rows: 4, label: "Message" });
	const send = async () => {
		if (!message.value.trim()) throw new Error("write a message");
		return h("pre.text", (await post(`${taskPath(run, task)}/continue`, { message: message.value })).text);
	};
	dialog(`Continue ${task}`, [h("p", "The turn is stored and paid for; the result of the task does not change."), message], { Send: send });
}

// A form made from a JSON Schema: choices, text, numbers, yes and no, objects of these; for any other schema JSON.
let forms = 0;

/** The field for an answer. `read` returns the value, and throws an Error if it is not filled in. */
export class Field {
	constructor(schema, initial, label) {
		this.label = label;
		const given = initial ?? undefined;
		const choices = schema?.enum || (schema?.const !== undefined && [schema.const]);
		const kind = schema ? schema.type : "string";
		if (choices) this.choose(choices, given);
		else if (kind === "boolean") this.choose([true, false], given, (one) => (one ? "yes" : "no"));
		else if (kind === "integer" || kind === "number") this.number(schema, given);
		else if (kind === "string") this.text(schema || {}, given);
		else if (kind === "object" && schema.properties) this.object(schema, given);
		else this.json(schema, given);
	}

	required(value) {
		if (value !== undefined && value !== "") return value;
		throw Object.assign(new Error(`${this.label}: give a value`), { isMissing: true });
	}

	choose(choices, given, named = spelled) {
		const isGiven = (one) => JSON.stringify(one) === JSON.stringify(given);
		const name = `choice-${(forms += 1)}`;
		const inputs = choices.map((one) => h("input", { type: "radio", name, checked: isGiven(one) }));
		this.element = h("div.radios", { role: "radiogroup", label: this.label }, choices.map((one, n) => h("label", inputs[n], named(one))));
		this.read = () => this.required(choices[inputs.findIndex((one) => one.checked)]);
	}

	number(schema, given = "") {
		const step = schema.type === "integer" ? 1 : "any";
		const input = (this.element = h("input", { type: "number", step, min: schema.minimum, max: schema.maximum, value: given, label: this.label }));
		this.read = () => {
			if (!input.validity.valid) throw new Error(`${this.label}: ${input.validationMessage}`);
			return Number(this.required(input.value));
		};
	}

	text(schema, given = "") {
		const attributes = { label: this.label, maxlength: schema.maxLength, value: given };
		this.element = schema.maxLength < 80 || schema.format ? h("input", { type: "text", ...attributes }) : h("textarea", { rows: 3, ...attributes });
		this.read = () => this.element.value;
	}

	object(schema, given) {
		const needed = new Set(schema.required || []);
		const fields = Object.entries(schema.properties).map(([name, inner]) => [name, inner, new Field(inner, given?.[name] ?? inner.default, inner.title || name)]);
		this.element = h("div", { role: "group", label: this.label }, fields.map(([name, inner, field]) =>
			h("div.field", h("b", field.label, !needed.has(name) && h("small", " (optional)")), inner.description && h("small.about", inner.description), field.element)));
		this.read = () => {
			const value = {};
			for (const [name, , field] of fields)
				try {
					const one = field.read();
					if (one !== "" || needed.has(name)) value[name] = one;
				} catch (error) {
					if (needed.has(name) || !error.isMissing) throw error;
				}
			return value;
		};
	}

	/** With an empty schema, text that is not JSON is the answer itself, as in `plait answer`. */
	json(schema, given) {
		const isAny = !Object.keys(schema).length;
		const value = given === undefined || (isAny && typeof given === "string") ? given : json(given);
		const [label, placeholder] = isAny ? [this.label, "Text or JSON"] : [`${this.label}, as JSON`, "JSON"];
		const input = h("textarea", { rows: 4, label, placeholder, value });
		this.element = h("div", input, !isAny && h("details", h("summary", "The schema"), h("pre", json(schema))));
		this.read = () => {
			const text = isAny ? input.value : this.required(input.value);
			try {
				return JSON.parse(text);
			} catch (error) {
				if (isAny) return text;
				throw new Error(`${this.label} is not JSON: ${error.message}`);
			}
		};
	}
}

// The questions to a person over all runs, each with its form.

/** Return the form of a question; `done` receives what was done with it, and the status of the run. */
export function questionForm(question, done, send = (how, said) => post(`${taskPath(question.run_id, question.task_id)}/${how}`, said)) {
	const said = h("div.ask", linked(question.question));
	const error = h("div");
	if (!question.asks) return decisionForm(send, said, error, done);
	const { schema, default: otherwise, deadline_at: deadline } = question.asks;
	const field = new Field(schema, otherwise, "Answer");
	const answer = working("Answer", error, async () => {
		const { status } = await send("answer", { value: field.read(), attempt: question.attempt });
		await done("answered", status);
	}, { class: "primary" });
	return h("form", { onsubmit: (event) => (event.preventDefault(), answer.click()) }, said,
		schema?.description && h("p.about", schema.description), field.element,
		h("div.actions", answer, h("span.about", termsOf(deadline, otherwise))), error);
}

function termsOf(deadline, otherwise) {
	const left = (time(deadline) - Date.now()) / 1000;
	const until = deadline && (left > 0 ? `until ${clock(deadline)}, in ${seconds(left)}` : `the deadline ${clock(deadline)} has passed`);
	return [until, (otherwise ?? null) !== null && `default ${spelled(otherwise)}`].filter(Boolean).join("; ");
}

function decisionForm(send, said, error, done) {
	const text = h("textarea", { rows: 2, label: "Result or reason" });
	const settle = (title, how, given) =>
		working(title, error, async () => {
			const { status } = await send("settle", { how, text: text.value });
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
