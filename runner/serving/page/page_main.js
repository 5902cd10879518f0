// The page: sign-in, the head with its places, and the place that the address names.

import { QuestionsPage } from "./dialogs.js";
import { button, h, replace } from "./dom.js";
import { get, poll, post } from "./page_api.js";
import { RunsPage } from "./run_list.js";
import { RunPage } from "./run_view.js";

let place = null;
let placeKey = "";
const [main, badge, link] = ["main", ".badge", ".link"].map((one) => document.querySelector(one));
const [runs, questions] = document.querySelectorAll("nav a");

function show() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
	const parts = path.split("/").filter(Boolean).map(decoded);
	const name = ["run", "questions"].find((one) => one === parts[0]) || "runs";
	for (const [of, anchor] of Object.entries({ runs, questions })) anchor.setAttribute("aria-current", of === name ? "page" : name === "run" && of === "runs");
	const key = name === "run" ? `run/${parts[1]}` : name;
	if (key !== placeKey) {
		place?.close?.();
		placeKey = key;
		setLink("");
		document.title = "plait";
		place = { run: () => new RunPage(parts[1], setLink), questions: () => new QuestionsPage(polling.now), runs: () => new RunsPage(setLink) }[name]();
		replace(main, place.element);
	}
	place.navigate(parts, new URLSearchParams(query));
}

function decoded(part) {
	try {
		return decodeURIComponent(part);
	} catch {
		return part;
	}
}

function setLink(state, message) {
	link.className = `link ${state}`;
	replace(link, state === "lost" ? message || "connection lost; trying again" : state);
}

async function readQuestions() {
	if (!place) return;
	const { questions } = await get("/api/questions");
	badge.hidden = !questions.length;
	replace(badge, questions.length);
	if (place instanceof QuestionsPage) place.draw(questions);
}

const polling = poll(readQuestions, (...state) => place instanceof QuestionsPage && setLink(...state));

function signedOut(message) {
	place?.close?.();
	place = null;
	placeKey = "";
	replace(main, h("section.notice", h("h1", "Not signed in"), h("p", `${message}; run \`plait ui\` on the same store, and open the address that it prints.`), button("Try again", start)));
}

/** Redeem the code of the address, if there is one, and show the place. */
async function start() {
	const code = location.hash.slice(1);
	if (code && !code.startsWith("/")) {
		history.replaceState(null, "", "#/");
		try {
			localStorage.token = (await post("/page/sign-in", { code })).token;
		} catch (error) {
			if (!(await get("/api/runs?limit=1").catch(() => null))) return signedOut(error.message);
		}
	}
	if (!localStorage.token) return signedOut("This browser has not signed in to this server");
	show();
	polling.now();
}

window.addEventListener("signed-out", () => signedOut("The server was started anew since this browser signed in"));
window.addEventListener("hashchange", () => (/^#[^/]/.test(location.hash) ? start() : show()));
start();
