// The page of one question, which the signed link of a notice opens: it reads and answers this question alone.

import { questionForm } from "./dialogs.js";
import { h, replace, RESUMABLE } from "./dom.js";
import { post } from "./page_api.js";

const ask = (said) => post("/page/question", { link: location.hash.slice(1), said });
const show = (...content) => replace(document.querySelector("main"), h("section.narrow", content));
const tell = (text) => show(h("p", { role: "status" }, text));
const done = (how, status) => tell(`The task is ${how}. ${RESUMABLE.includes(status) ? "No process runs its run: resume it to continue." : "Its run continues."}`);

window.addEventListener("hashchange", () => location.reload());
ask().then((question) => show(h("h1", question.task_id, " in ", question.run_name || question.run_id), questionForm(question, done, (_how, said) => ask(said))), (error) => tell(error.message));
