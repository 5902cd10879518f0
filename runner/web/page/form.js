// A form made from a JSON Schema: choices, text, numbers, yes and no, objects of these; any other schema is JSON text.

import { h } from "./dom.js";
import { json } from "./format.js";

const MOST_RADIOS = 6;
let forms = 0;

/** The field for an answer. `read` returns the value, and throws an Error with the reason if it is not filled in. */
export class Field {
  constructor(schema, initial, label) {
    this.name = `field-${(forms += 1)}`;
    const made = this.make(schema, initial, label);
    this.element = made.element;
    this.read = made.read;
  }

  make(schema, initial, label) {
    const given = initial === undefined || initial === null ? undefined : initial;
    if (!schema) return this.text(given, label, true);
    const choices = schema.enum || (schema.const !== undefined ? [schema.const] : null);
    if (choices) return this.choice(choices, given, label);
    if (schema.type === "boolean") return this.choice([true, false], given, label, (one) => (one ? "yes" : "no"));
    if (schema.type === "integer" || schema.type === "number") return this.number(schema, given, label);
    if (schema.type === "string") return this.text(given, label, !(schema.maxLength < 80) && !schema.format, schema);
    if (schema.type === "object" && schema.properties) return this.object(schema, given, label);
    if (schema.type === "array" && schema.items?.enum) return this.several(schema.items.enum, given, label);
    return this.json(schema, given, label);
  }

  choice(choices, given, label, named = (one) => (typeof one === "string" ? one : JSON.stringify(one))) {
    const same = (one) => JSON.stringify(one) === JSON.stringify(given);
    if (choices.length > MOST_RADIOS) {
      const select = h("select", { "aria-label": label }, h("option", { value: "" }, "choose…"),
        choices.map((one, n) => h("option", { value: String(n), selected: same(one) }, named(one))));
      return { element: select, read: () => choices[required(select.value, label)] };
    }
    const name = `${this.name}-${label}`;
    const inputs = choices.map((one, n) => h("input", { type: "radio", name, value: String(n), checked: same(one) }));
    const element = h("div.radios", { role: "radiogroup", "aria-label": label },
      choices.map((one, n) => h("label", inputs[n], named(one))));
    return { element, read: () => choices[required(inputs.find((one) => one.checked)?.value, label)] };
  }

  several(choices, given, label) {
    const inputs = choices.map((one) => h("input", { type: "checkbox", checked: (given || []).includes(one) }));
    const element = h("div.radios", { role: "group", "aria-label": label },
      choices.map((one, n) => h("label", inputs[n], String(one))));
    return { element, read: () => choices.filter((_, n) => inputs[n].checked) };
  }

  number(schema, given, label) {
    const step = schema.type === "integer" ? 1 : "any";
    const input = h("input", { type: "number", step, min: schema.minimum, max: schema.maximum, value: given ?? "", "aria-label": label });
    return {
      element: input,
      read: () => {
        if (!input.validity.valid) throw new Error(`${label}: ${input.validationMessage}`);
        return Number(required(input.value, label));
      },
    };
  }

  text(given, label, long, schema = {}) {
    const kinds = { date: "date", email: "email", uri: "url" };
    const attributes = { "aria-label": label, maxlength: schema.maxLength, value: given ?? "" };
    const input = long ? h("textarea", { rows: 3, ...attributes }) : h("input", { type: kinds[schema.format] || "text", ...attributes });
    return { element: input, read: () => input.value };
  }

  object(schema, given, label) {
    const needed = new Set(schema.required || []);
    const fields = Object.entries(schema.properties).map(([name, inner]) => {
      const title = inner.title || name;
      const field = new Field(inner, given?.[name] ?? inner.default, title);
      return { name, field, row: h("div.field", h("span.label", title, !needed.has(name) && h("small", " (optional)")),
        inner.description && h("small.about", inner.description), field.element) };
    });
    const read = () => {
      const value = {};
      for (const { name, field } of fields) {
        try {
          const one = field.read();
          if (one !== "" || needed.has(name)) value[name] = one;
        } catch (error) {
          if (needed.has(name) || !error.missing) throw error;
        }
      }
      return value;
    };
    return { element: h("div.fields", { role: "group", "aria-label": label }, fields.map((one) => one.row)), read };
  }

  json(schema, given, label) {
    const input = h("textarea", { rows: 4, class: "mono", "aria-label": `${label}, as JSON`, placeholder: "JSON", value: given === undefined ? "" : json(given) });
    const element = h("div", input, h("details", h("summary", "The schema"), h("pre", json(schema))));
    return {
      element,
      read: () => {
        try {
          return JSON.parse(required(input.value, label));
        } catch (error) {
          if (error.missing) throw error;
          throw new Error(`${label} is not JSON: ${error.message}`);
        }
      },
    };
  }
}

function required(value, label) {
  if (value !== undefined && value !== "") return value;
  const error = new Error(`${label}: give a value`);
  error.missing = true;
  throw error;
}
