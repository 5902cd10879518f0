// A form made from a JSON Schema: choices, text, numbers, yes and no, objects of these; for any other schema JSON.

import { h } from "./dom.js";
import { json } from "./format.js";

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
