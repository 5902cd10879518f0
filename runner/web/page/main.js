// The page: sign-in, the head with its places, and the place that the address names.

import { call, get, Refused } from "./api.js";
import { h, replace } from "./dom.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";
import { QuestionsPage } from "./questions.js";

const COUNT_MS = 4000;
let place = null;
let placeKey = "";
const main = h("main", { id: "main", tabindex: "-1" });
const badge = h("span.badge", { hidden: true });
const link = h("span.link", { role: "status" });
const nav = {
  runs: h("a", { href: "#/" }, "Runs"),
  questions: h("a", { href: "#/questions" }, "Questions", badge),
};

/** Return the parts of the address behind `#/`, and its query. */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(query || "") };
}

function show() {
  const { parts, query } = address();
  const key = parts[0] === "run" ? `run/${parts[1]}` : parts[0] || "runs";
  for (const [name, anchor] of Object.entries(nav))
    if ((parts[0] === "questions") === (name === "questions")) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  if (key === placeKey) return place.navigate(parts, query);
  place?.close();
  placeKey = key;
  setLink("");
  document.title = "plait";
  if (parts[0] === "run" && parts[1]) place = new RunPage(parts[1], setLink);
  else if (parts[0] === "questions") place = new QuestionsPage(setLink, countQuestions);
  else place = new RunsPage(setLink);
  replace(main, place.element);
  place.navigate(parts, query);
}

function setLink(state, message) {
  const told = { live: "live", lost: message || "connection lost; trying again", reading: "reading", "": "" }[state];
  link.className = `link ${state}`;
  replace(link, told);
}

async function countQuestions() {
  try {
    const { questions } = await get("/api/questions");
    badge.hidden = !questions.length;
    replace(badge, String(questions.length));
    badge.setAttribute("aria-label", `${questions.length} open`);
  } catch {
    // the place that is shown says so
  }
}

function signedOut(message) {
  place?.close();
  place = null;
  placeKey = "";
  replace(
    main,
    h("section.notice", h("h1", "Not signed in"), h("p", message),
      h("p", "Run ", h("code", "plait ui"), " on the same store: it opens this page with a new code."),
      h("button", { type: "button", onclick: () => start() }, "Try again")),
  );
}

async function start() {
  const code = location.hash.slice(1);
  if (code && !code.startsWith("/")) {
    history.replaceState(null, "", "#/");
    try {
      await call("POST", "/page/sign-in", { code });
    } catch (error) {
      // A browser that has signed in before needs no code.
      try {
        await get("/api/runs?limit=1");
      } catch {
        return signedOut(error.message);
      }
    }
  } else {
    try {
      await get("/api/runs?limit=1");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return;
    }
  }
  show();
  countQuestions();
}

window.addEventListener("signed-out", () => signedOut("This browser has no valid sign-in for this server."));
window.addEventListener("hashchange", () => {
  const hash = location.hash.slice(1);
  if (hash && !hash.startsWith("/")) start();
  else show();
});
setInterval(() => document.hidden || !place || countQuestions(), COUNT_MS);
document.addEventListener("visibilitychange", () => document.hidden || !place || countQuestions());
document.body.append(
  h("a.skip", { href: "#main", onclick: (event) => (event.preventDefault(), main.focus()) }, "Skip to content"),
  h("header.top", h("a.brand", { href: "#/" }, "plait"), h("nav", { "aria-label": "Places" }, nav.runs, nav.questions), link),
  main,
);
start();
