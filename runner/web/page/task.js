// One task in full: why it waits, its question, error, result, conversation, attempts, prompt and usage.

import { button, h, linked, replace, status } from "./dom.js";
import { continueTask } from "./dialog.js";
import { clock, cost, count, json, seconds, tokens } from "./format.js";
import { afterAnswer, questionForm } from "./questions.js";

const MOST_ACTIVITY = 1000;
export class TaskPanel {
  constructor(run, onclose) {
    this.run = run;
    this.activity = [];
    this.title = h("h2", { tabindex: "-1" });
    this.told = h("p.told", { role: "status" });
    this.parts = Object.fromEntries(["why", "ask", "error", "result", "talk", "tries", "more"].map((name) => [name, h("div", { class: `part-${name}` })]));
    this.head = h("div.facts");
    this.actions = h("div.actions");
    this.element = h("aside.panel", { "aria-label": "Task", onkeydown: (event) => event.key === "Escape" && onclose() },
      h("header", this.title, button("✕", onclose, { "aria-label": "Close the task", class: "quiet" })),
      this.head, this.actions, this.told, Object.values(this.parts));
  }

  opened() {
    this.activity = [];
  }

  show(task) {
    this.task = task;
    replace(this.title, task.task_id);
    replace(this.head, status(task.status),
      [task.backend && `backend ${task.backend}`, task.model, task.duration_s !== null && seconds(task.duration_s),
        task.input_tokens + task.output_tokens > 0 && `${tokens(task.input_tokens)} in, ${tokens(task.output_tokens)} out`,
        cost(task.cost_usd, task.cost_is_partial)].filter(Boolean).map((text) => h("span", text)));
    const talks = task.messages.length > 0 && task.status !== "waiting_input" && task.status !== "running";
    replace(this.actions, talks && button("Continue the conversation", () => continueTask(this.run, task.task_id)));
    this.showWhy(task.waits?.kind === "question" ? "" : task.waits?.text);
    this.showQuestion(task);
    this.showError(task);
    this.showResult(task);
    this.showTalk();
    this.showTries(task);
    this.showMore(task);
  }

  showWhy(text) {
    if (text !== this.why) replace(this.parts.why, text && h("p.callout", h("b", "Why it waits: "), text));
    this.why = text;
  }

  showQuestion(task) {
    const key = task.status === "waiting_input" ? `${task.attempts}` : "";
    if (key === this.asked) return;
    this.asked = key;
    const question = { run_id: this.run, task_id: task.task_id, attempt: task.attempts, question: task.question || "", asks: task.asks };
    replace(this.parts.ask, key && [h("h3", "Question"), questionForm(question, (how) => afterAnswer(this.told, question, how))]);
  }

  showError(task) {
    if (!task.error_kind) return replace(this.parts.error);
    const traceback = task.history.findLast((one) => one.traceback)?.traceback;
    replace(this.parts.error, h("h3", "Error"),
      h("div.callout.bad", h("b", task.error_kind), ": ", linked(task.error || "")),
      task.remedy && h("p.about", task.remedy),
      traceback && h("details", { open: true }, h("summary", "Traceback"), h("pre", traceback)));
  }

  showResult(task) {
    if (task.damaged) return replace(this.parts.result, h("h3", "Result"), h("p.callout.bad", "The stored result does not match its checksum. Retry failed tasks to run the task again."));
    const data = task.data !== null;
    replace(this.parts.result, (data || task.text !== null) && [h("h3", "Result"), data ? dataOf(task.data) : h("pre.text", linked(task.text))]);
  }

  showActivity(entries) {
    this.activity.push(...entries);
    if (this.activity.length > MOST_ACTIVITY) this.activity.splice(0, this.activity.length - MOST_ACTIVITY);
    this.showTalk();
  }

  /** Show the messages by attempt, with the output of agents: of a running attempt in full, of others folded. */
  showTalk() {
    const { task } = this;
    if (!task) return;
    const open = new Set([...this.parts.talk.querySelectorAll("details[open]")].map((one) => one.dataset.attempt));
    const attempts = new Set([...task.messages.map((one) => one.attempt), ...this.activity.map((one) => one.attempt)]);
    if (task.rendered) attempts.add(task.attempts);
    const order = [...attempts].sort((one, other) => (one || Infinity) - (other || Infinity));
    const parts = order.map((attempt) => {
      const messages = task.messages.filter((one) => one.attempt === attempt);
      const output = this.activity.filter((one) => one.attempt === attempt);
      const running = task.status === "running" && attempt === task.attempts;
      const [prompt, answers] = [messages.filter((one) => one.role === "user"), messages.filter((one) => one.role !== "user")];
      const ended = task.history.find((one) => one.attempt === attempt);
      const how = ended && !["completed", "running", "asked"].includes(ended.status) ? `, ${ended.status}` : "";
      return h("div.turn",
        (order.length > 1 || how) && h("h4", attempt ? `Attempt ${attempt}${how}` : "After the run"),
        attempt === 0
          ? messages.map(message)
          : [prompt.map(message), !prompt.length && attempt === task.attempts && task.rendered && message({ role: "user", content: task.rendered }),
             activity(output, running, open.has(String(attempt)), attempt), answers.map(message)]);
    });
    const atEnd = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 40;
    replace(this.parts.talk, parts.length > 0 && h("h3", "Conversation"), parts);
    if (atEnd && task.status === "running") this.element.scrollTop = this.element.scrollHeight;
  }

  showTries(task) {
    replace(this.parts.tries, task.history.length > 0 && [h("h3", "Attempts"),
      h("div.scroll", h("table.tight",
        h("thead", h("tr", ["#", "Status", "Started", "Time", "Tokens", "Cost", "Error"].map((title) => h("th", { scope: "col" }, title)))),
        h("tbody", task.history.map((one) => h("tr", {},
          h("td.num", String(one.attempt)), h("td", one.status), h("td.num", clock(one.started_at)), h("td.num", seconds(one.duration_s)),
          h("td.num", tokens(one.input_tokens + one.output_tokens)), h("td.num", cost(one.cost_usd, one.cost_is_partial)),
          h("td", one.error_kind && `${one.error_kind}: ${one.error}`))))))]);
  }

  showMore(task) {
    const link = (id) => h("a", { href: `#/run/${encodeURIComponent(this.run)}/task/${encodeURIComponent(id)}` }, id);
    const fact = (name, value) => (value === null || value === undefined || value === "" || value === 0 ? null : [h("dt", name), h("dd", value)]);
    replace(this.parts.more, h("h3", "More"), h("dl", {},
      fact("Depends on", task.depends_on.length ? task.depends_on.slice(0, 50).map((id, n) => [n ? ", " : "", link(id)]) : null),
      fact("Added by", task.added_by && link(task.added_by)),
      fact("Session", task.session_id && h("code", task.session_id)),
      fact("Started", clock(task.started_at)), fact("Ended", clock(task.ended_at)),
      fact("Next attempt", clock(task.next_try_at)),
      fact("Read from cache", task.cache_read_tokens && `${count(task.cache_read_tokens)} tokens`),
      fact("Written to cache", task.cache_write_tokens && `${count(task.cache_write_tokens)} tokens`),
      fact("Reasoning", task.reasoning_tokens && `${count(task.reasoning_tokens)} tokens`),
      task.answers.map((one) => fact(`Answered by ${one.by}`, [one.question, " → ", typeof one.value === "string" ? one.value : JSON.stringify(one.value)]))),
    h("details", h("summary", "Prompt template"), h("pre.text", task.prompt)),
    Object.keys(task.spec).length > 0 && h("details", h("summary", "Settings"), h("pre", json(task.spec))));
  }
}

function message(one) {
  return h("div", { class: `message ${one.role === "user" ? "user" : one.role === "assistant" ? "assistant" : "system"}` },
    h("span.role", one.role === "user" ? "prompt" : one.role),
    h("pre.text", one.damaged ? "(the stored message is damaged)" : linked(one.content)));
}

/** Return the output of an agent: texts run together, each tool in a line of its own. */
function activity(entries, running, open, attempt) {
  if (!entries.length) return running ? h("p.about", "at work…") : null;
  const lines = [];
  for (const one of entries) {
    const last = lines.at(-1);
    if (one.kind === "text" && last?.kind === "text") last.text += one.text;
    else lines.push({ ...one });
  }
  const body = lines.map((one) => (one.kind === "text" ? h("pre.text", linked(one.text)) : h("div", { class: `step ${one.kind}` }, h("span.role", one.kind), " ", one.text)));
  if (running) return h("div.message.assistant", { "aria-busy": "true" }, h("span.role", "at work"), body);
  const tools = entries.filter((one) => one.kind !== "text").length;
  return h("details", { "data-attempt": attempt, open }, h("summary", tools ? `${count(tools)} steps of the agent` : "Output of the agent"), body);
}

/** Return structured data: a list of objects as a table, an object as pairs, anything else as JSON. */
function dataOf(value) {
  const flat = (one) => one !== null && typeof one === "object" && !Array.isArray(one);
  const cellOf = (one) => (one === undefined ? "" : typeof one === "string" ? linked(one) : JSON.stringify(one));
  if (Array.isArray(value) && value.length > 0 && value.length <= 200 && value.every(flat)) {
    const names = [...new Set(value.flatMap(Object.keys))].slice(0, 12);
    return h("div.scroll", h("table.tight", h("thead", h("tr", names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", value.map((one) => h("tr", names.map((name) => h("td", cellOf(one[name]))))))));
  }
  if (flat(value) && Object.keys(value).length > 0 && Object.keys(value).length <= 50)
    return h("dl.data", Object.entries(value).map(([name, one]) => [h("dt", name), h("dd", one !== null && typeof one === "object" ? h("pre", json(one)) : cellOf(one))]));
  return h("pre", json(value));
}
