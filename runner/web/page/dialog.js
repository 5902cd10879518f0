// Dialogs: a decision before each change that cannot be undone or costs money.

import { get, post, runPath, taskPath } from "./api.js";
import { button, h, replace } from "./dom.js";
import { count, plural } from "./format.js";

const MOST_STEPS = 200;

/** Open a dialog. `body` receives the functions `close` and `fail`, and returns its elements. */
export function dialog(title, body) {
  const error = h("p.error", { role: "alert", hidden: true });
  const box = h("dialog", { "aria-label": title, onclose: () => box.remove() });
  const close = () => box.close();
  const fail = (told) => {
    error.hidden = !told;
    replace(error, told?.message || "");
  };
  const content = h("div");
  box.append(h("h2", title), content, error);
  document.body.append(box);
  replace(content, body({ close, fail, content }));
  box.showModal();
  return box;
}

/** Return a button that is disabled while `work` is under way, and shows what went wrong. */
export function working(text, fail, work, given = {}) {
  const made = button(text, async () => {
    made.disabled = true;
    fail(null);
    try {
      await work();
    } catch (error) {
      fail(error);
    } finally {
      made.disabled = false;
    }
  }, given);
  return made;
}

export function cancelRun(run) {
  dialog("Cancel the run?", ({ close, fail }) => [
    h("p", "The run is ended for good and cannot be resumed. No further task starts; running tasks may end by themselves for a few seconds."),
    h("div.actions",
      working("Cancel the run", fail, async () => (await post(`${runPath(run)}/cancel`), close()), { class: "danger" }),
      button("Keep it", close)),
  ]);
}

/** Show what a resume would do, task by task, and resume. */
export function resumeRun(run, retryFailed) {
  dialog(retryFailed ? "Retry failed tasks" : "Resume the run", ({ close, fail, content }) => {
    const go = async () => {
      await post(`${runPath(run)}/resume`, { retry_failed: retryFailed });
      close();
    };
    const query = retryFailed ? "?retry_failed=true" : "";
    get(`${runPath(run)}/preview${query}`).then(
      (preview) => replace(content, previewOf(preview), h("div.actions",
        preview.ended ? null : working(retryFailed ? "Run them again" : "Resume", fail, go, { class: "primary" }),
        button(preview.ended ? "Close" : "Not now", close))),
      (error) => {
        replace(content, h("div.actions", button("Close", close)));
        fail(error);
      },
    );
    return h("p", "Reading what would run…");
  });
}

function previewOf(preview) {
  if (preview.ended) return h("p", `The run is ${preview.status}; nothing is left to do.`);
  const steps = preview.tasks.filter((step) => step.action !== "keep");
  const kept = preview.tasks.length - steps.length;
  const bill = preview.possibly_billed_twice
    ? h("p.warn", `${plural(preview.possibly_billed_twice, "task")} may be billed twice, about ${count(preview.repeated_input_tokens)} input tokens and the output before the interruption.`)
    : h("p", "Nothing is billed twice.");
  return [
    h("p", `${plural(preview.runs, "task")} would run; ${plural(kept, "task")} kept${preview.adopted ? `; ${plural(preview.adopted, "agent")} still at work` : ""}.`),
    bill,
    preview.damaged.length > 0 && h("p.warn", `The stored results of ${preview.damaged.slice(0, 5).join(", ")} are damaged and count as failed.`),
    h("div.steps", h("table", h("tbody", steps.slice(0, MOST_STEPS).map((step) =>
      h("tr", h("td.mono", step.task_id), h("td", h("b", step.action)), h("td", step.reason, step.possibly_billed_twice && h("em", " may be billed twice"))))))),
    steps.length > MOST_STEPS && h("p", `and ${count(steps.length - MOST_STEPS)} more`),
  ];
}

export function continueTask(run, task) {
  dialog(`Continue ${task}`, ({ close, fail, content }) => {
    const message = h("textarea", { rows: 4, "aria-label": "Message" });
    const send = working("Send", fail, async () => {
      if (!message.value.trim()) throw new Error("write a message");
      const reply = await post(`${taskPath(run, task)}/continue`, { message: message.value });
      replace(content, h("pre.text", reply.text), h("div.actions", button("Close", close)));
    }, { class: "primary" });
    return [h("p", "One more message in the conversation of this task. The turn is stored and paid for; the result of the task does not change."), message,
      h("div.actions", send, button("Not now", close))];
  });
}
