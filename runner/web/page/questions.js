// The questions to a person over all runs, each with its form.

import { get, post, runPath, taskPath } from "./api.js";
import { h, linked, replace } from "./dom.js";
import { working } from "./dialog.js";
import { Field } from "./form.js";
import { ago, clock, seconds, time } from "./format.js";

const POLL_MS = 3000;

/** Return the form of a question: the field, the deadline and the default; `done` is called after the answer. */
export function questionForm(question, done) {
  const error = h("p.error", { role: "alert", hidden: true });
  const fail = (told) => {
    error.hidden = !told;
    replace(error, told?.message || "");
  };
  const path = taskPath(question.run_id, question.task_id);
  const said = h("div.ask", linked(question.question));
  if (!question.asks) return decisionForm(path, question, said, error, fail, done);
  const { schema, default: otherwise, deadline_at: deadline } = question.asks;
  const field = new Field(schema, otherwise, "Answer");
  const send = async () => {
    const value = field.read();
    await post(`${path}/answer`, { value, attempt: question.attempt });
    await done("answered");
  };
  const form = h("form.question", { onsubmit: (event) => (event.preventDefault(), button.click()) }, said,
    schema?.description && h("p.about", schema.description), field.element);
  const button = working("Answer", fail, send, { class: "primary" });
  form.append(h("div.actions", button, h("span.about", termsOf(deadline, otherwise))), error);
  return form;
}

function termsOf(deadline, otherwise) {
  const parts = [];
  if (deadline) {
    const left = (time(deadline) - Date.now()) / 1000;
    parts.push(left > 0 ? `until ${clock(deadline)}, in ${seconds(left)}` : `the deadline ${clock(deadline)} has passed`);
  }
  if (otherwise !== null && otherwise !== undefined) parts.push(`default ${typeof otherwise === "string" ? otherwise : JSON.stringify(otherwise)}`);
  return parts.join("; ");
}

function decisionForm(path, question, said, error, fail, done) {
  const text = h("textarea", { rows: 2, "aria-label": "Result or reason" });
  const settle = (how) => async () => {
    await post(`${path}/settle`, { how, text: text.value });
    await done("settled");
  };
  return h("form.question", { onsubmit: (event) => event.preventDefault() }, said,
    h("p.about", "The process died while the task was running, and the task is marked at_most_once. Did it take effect?"), text,
    h("div.actions",
      working("It did: complete with this result", fail, settle("done")),
      working("It did not: run it again", fail, settle("again")),
      working("Fail it for this reason", fail, settle("fail"), { class: "danger" })), error);
}

export class QuestionsPage {
  constructor(setLink, onchange) {
    this.setLink = setLink;
    this.onchange = onchange;
    this.shown = new Map();
    this.list = h("div.questions");
    this.empty = h("p.empty", { hidden: true }, "No task asks a person.");
    this.live = h("p", { role: "status", class: "told" });
    this.element = h("section.narrow", h("h1", "Questions"), this.live, this.list, this.empty);
    this.timer = setInterval(() => document.hidden || this.load(), POLL_MS);
  }

  close() {
    clearInterval(this.timer);
    this.closed = true;
  }

  navigate() {
    this.load();
  }

  async load() {
    try {
      const { questions } = await get("/api/questions");
      if (this.closed) return;
      this.setLink("live");
      this.draw(questions);
    } catch (error) {
      if (!this.closed && error.status !== 401) this.setLink("lost", error.message);
    }
  }

  /** Add and remove cards; a card that stays is not touched, since a person may be writing in it. */
  draw(questions) {
    const keys = new Set();
    for (const question of questions) {
      const key = JSON.stringify([question.run_id, question.task_id, question.attempt]);
      keys.add(key);
      if (this.shown.has(key)) continue;
      const run = `#/run/${encodeURIComponent(question.run_id)}`;
      const card = h("article.card",
        h("header", h("a", { href: `${run}/task/${encodeURIComponent(question.task_id)}` }, question.task_id), " in ",
          h("a", { href: run }, question.run_name || question.run_id), h("span.about", ago(question.since))),
        questionForm(question, (how) => this.answered(question, how)));
      this.shown.set(key, card);
      this.list.append(card);
    }
    for (const [key, card] of this.shown)
      if (!keys.has(key)) {
        card.remove();
        this.shown.delete(key);
      }
    this.empty.hidden = questions.length > 0;
  }

  async answered(question, how) {
    await afterAnswer(this.live, question, how);
    this.onchange();
    await this.load();
  }
}

/** Say that the task has its answer, with the way to go on if no process runs the run. */
export async function afterAnswer(place, question, how) {
  const run = await get(runPath(question.run_id));
  const stopped = ["waiting_input", "interrupted", "queued"].includes(run.status);
  const resume = h("button", { type: "button", onclick: async () => {
    try {
      await post(`${runPath(question.run_id)}/resume`);
      replace(place, `Run ${question.run_id} continues.`);
    } catch (error) {
      replace(place, h("span.error", error.message));
    }
  } }, "Resume the run");
  replace(place, `${question.task_id} is ${how}. `, stopped && ["No process runs its run. ", resume]);
}
