// The page: sign-in, the head with its places, and the place that the address names.

import { call, get, signedIn } from "./api.js";
import { button, h, replace } from "./dom.js";
import { QuestionsPage } from "./questions.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const COUNT_MS = 4000;
let place = null;
let placeKey = "";
const main = h("main", { id: "main", tabindex: "-1" });
const badge = h("span.badge", { hidden: true });
const link = h("span.link", { role: "status" });
const nav = { runs: h("a", { href: "#/" }, "Runs"), questions: h("a", { href: "#/questions" }, "Questions", badge) };

/** Show the place that the parts of the address behind `#/` name. */
function show() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const name = { run: "run", questions: "questions" }[parts[0]] || "runs";
  for (const [of, anchor] of Object.entries(nav)) anchor.setAttribute("aria-current", of === name ? "page" : name === "run" && of === "runs");
  const key = name === "run" ? `run/${parts[1]}` : name;
  if (key !== placeKey) {
    place?.close();
    placeKey = key;
    setLink("");
    document.title = "plait";
    place = name === "run" ? new RunPage(parts[1], setLink) : name === "questions" ? new QuestionsPage(setLink, countQuestions) : new RunsPage(setLink);
    replace(main, place.element);
  }
  place.navigate(parts, new URLSearchParams(query));
}

function setLink(state, message) {
  link.className = `link ${state}`;
  replace(link, state === "lost" ? message || "connection lost; trying again" : state);
}

async function countQuestions() {
  if (document.hidden || !place) return;
  try {
    const { questions } = await get("/api/questions");
    badge.hidden = !questions.length;
    replace(badge, questions.length);
  } catch {
    // the place that is shown says so
  }
}

function signedOut(message) {
  place?.close();
  place = null;
  placeKey = "";
  replace(main, h("section.notice", h("h1", "Not signed in"), h("p", message),
    h("p", "Run ", h("code", "plait ui"), " on the same store: it opens this page with a new code."), button("Try again", start)));
}

/** Redeem the code of the address, if there is one, and show the place. A browser that has signed in needs no code. */
async function start() {
  const code = location.hash.slice(1);
  const hasCode = code && !code.startsWith("/");
  if (hasCode) history.replaceState(null, "", "#/");
  try {
    await (hasCode ? call("POST", "/page/sign-in", { code }) : signedIn());
  } catch (error) {
    if (error.status === 401 && !hasCode) return;
    if (error.status === 401 && !(await signedIn().catch(() => null))) return signedOut(error.message);
  }
  show();
  countQuestions();
}

window.addEventListener("signed-out", () => signedOut("This browser has no valid sign-in for this server."));
window.addEventListener("hashchange", () => (/^#[^/]/.test(location.hash) ? start() : show()));
setInterval(countQuestions, COUNT_MS);
document.addEventListener("visibilitychange", countQuestions);
document.body.append(
  h("a.skip", { href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to content"),
  h("header.top", h("a.brand", { href: "#/" }, "plait"), h("nav", { "aria-label": "Places" }, nav.runs, nav.questions), link),
  main,
);
start();
