// Dialogs: a decision before each change that cannot be undone or costs money.

import { button, count, h, json, plural, replace, table } from "./dom.js";
import { get, post, runPath, taskPath } from "./page_api.js";

const MOST_STEPS = 200;

/** Open a dialog. `body` receives the places of content and errors and `close`, and returns the content. */
function dialog(title, body) {
	const [content, error] = [h("div"), h("div")];
	const box = h("dialog", { label: title, onclose: () => box.remove() }, h("h2", title), content, error);
	document.body.append(box);
	replace(content, body(content, error, () => box.close()));
	box.showModal();
}

const closing = (close) => h("div.actions", button("Close", close));

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

export function cancelRun(run) {
	dialog("Cancel the run?", (_, error, close) => [
		h("p", "The run is ended for good and cannot be resumed. No further task starts; running tasks may end by themselves for a few seconds."),
		h("div.actions",
			working("Cancel the run", error, () => post(`${runPath(run)}/cancel`).then(close), { class: "danger" }),
			button("Keep it", close)),
	]);
}

export function pauseRun(run, isPaused) {
	dialog(isPaused ? "Let the run go on?" : "Pause the run?", (_, error, close) => [
		h("p", isPaused ? "Its tasks start again within a second." : "No further task starts; calls under way end normally."),
		h("div.actions",
			working(isPaused ? "Let it go on" : "Pause the run", error, () => post(`${runPath(run)}/pause`, { off: !!isPaused }).then(close), { class: "primary" }),
			button("Not now", close)),
	]);
}

export function tuneRun(run) {
	const number = h("input", { type: "number", min: 1, max: 10000, label: "Tasks at once" });
	dialog("Change the width", (_, error, close) => [
		h("p", "How many tasks may run at once:"), number,
		h("div.actions",
			working("Change", error, () => post(`${runPath(run)}/tune`, { concurrency: number.valueAsNumber }).then(close), { class: "primary" }),
			button("Not now", close)),
	]);
}

export function resumeRun(run, retryFailed) {
	dialog(retryFailed ? "Retry failed tasks" : "Resume the run", (content, error, close) => {
		const go = () => post(`${runPath(run)}/resume`, { retry_failed: retryFailed }).then(close);
		const read = async () => {
			const preview = await get(`${runPath(run)}/preview?retry_failed=${retryFailed}`);
			replace(content, previewOf(preview), h("div.actions",
				!preview.ended && working(retryFailed ? "Run them again" : "Resume", error, go, { class: "primary" }),
				button(preview.ended ? "Close" : "Not now", close)));
		};
		read().catch((refused) => replace(content, alarm(refused), closing(close)));
		return h("p", "Reading what would run…");
	});
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
	dialog(`Continue ${task}`, (content, error, close) => {
		const message = h("textarea", { rows: 4, label: "Message" });
		const send = async () => {
			if (!message.value.trim()) throw new Error("write a message");
			const reply = await post(`${taskPath(run, task)}/continue`, { message: message.value });
			replace(content, h("pre.text", reply.text), closing(close));
		};
		return [h("p", "One more message in the conversation of this task. The turn is stored and paid for; the result of the task does not change."), message,
			h("div.actions", working("Send", error, send, { class: "primary" }), button("Not now", close))];
	});
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

	choose(choices, given, named = (one) => (typeof one === "string" ? one : JSON.stringify(one))) {
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
