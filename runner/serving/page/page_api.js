// Requests to the server, and the stream of a run.

const BUDGET_MS = 8;
const POLL_MS = 2000;
const RETRY_MS = 1000;

/** Return the answer. Throws an Error with the message of the server and the `status`; 0 without an answer. */
async function ask(path, given) {
	const headers = { authorization: `Bearer ${localStorage.token}`, "content-type": "application/json" };
	const answer = await fetch(path, { headers, ...given }).catch(() => null);
	if (answer?.ok) return answer;
	const value = await answer?.json().catch(() => null);
	if (answer?.status === 401) window.dispatchEvent(new Event("signed-out"));
	const message = value?.error?.message || (answer ? `the server answered with status ${answer.status}` : "the server does not answer; is `plait ui` still running?");
	throw Object.assign(new Error(message), { status: answer?.status || 0 });
}

export const get = async (path, given) => (await ask(path, given)).json();
export const post = (path, body = {}) => get(path, { method: "POST", body: JSON.stringify(body) });
export async function download(path, name) {
	const href = URL.createObjectURL(await (await ask(path)).blob());
	const link = Object.assign(document.createElement("a"), { href, download: name });
	link.click();
	setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

export const runPath = (run) => `/api/runs/${encodeURIComponent(run)}`;
export const taskPath = (run, task) => `${runPath(run)}/tasks/${encodeURIComponent(task)}`;

/** Call `load` again and again while the tab is seen. `onstate` receives "live", or "lost" and the reason. */
export function poll(load, onstate) {
	let isOver = false;
	const now = () =>
		load().then(() => isOver || onstate("live"), (error) => isOver || error.status === 401 || onstate("lost", error.message));
	const timer = setInterval(() => document.hidden || now(), POLL_MS);
	return { now, end: () => ((isOver = true), clearInterval(timer)) };
}

/** Give the kind and the data of each event in `body`. */
async function readEvents(body, give) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let [kind, held] = ["", []];
	for (;;) {
		const { value, done } = await reader.read().catch(() => ({ done: true }));
		if (done) return;
		const [first, ...rest] = value.split("\n");
		held.push(first);
		for (const next of rest) {
			const line = held.join("");
			held = [next];
			if (line.startsWith("event: ")) kind = line.slice(7);
			else if (kind === "failed") throw new Error(JSON.parse(line.slice(6)).message);
			else if (line.startsWith("data: ")) give(kind, line.slice(6));
		}
	}
}

/**
 * The changes of a run. The stream is closed while the tab is hidden, since a browser opens few connections to a server.
 * Each frame takes changes for BUDGET_MS at most. `onstate` receives "live", "reading" or "lost".
 */
export class Live {
	constructor(run, task, handlers, onstate) {
		this.path = `/page/runs/${encodeURIComponent(run)}/live`;
		if (task) this.path += `?task=${encodeURIComponent(task)}`;
		this.handlers = handlers;
		this.onstate = onstate;
		this.onvisible = () => (document.hidden ? this.pause() : this.open());
		document.addEventListener("visibilitychange", this.onvisible);
		this.onvisible();
	}

	async open() {
		this.pause();
		this.onstate("reading");
		const { signal } = (this.reading = new AbortController());
		try {
			const { body } = await ask(this.path, { signal });
			this.isOpen = true;
			this.gather("opened", "null");
			await readEvents(body, (kind, data) => signal.aborted || this.gather(kind, data));
			throw new Error();
		} catch (error) {
			if (signal.aborted) return;
			this.isOpen = false;
			this.onstate("lost", error.message, error.status);
			if (error.status !== 401) this.timer = setTimeout(() => this.open(), RETRY_MS);
		}
	}

	gather(kind, data) {
		this.queue.push([kind, data]);
		this.frame ||= requestAnimationFrame(() => this.flush());
	}

	flush() {
		const end = performance.now() + BUDGET_MS;
		let taken = 0;
		while (taken < this.queue.length && performance.now() < end) {
			const [kind, data] = this.queue[taken++];
			this.handlers[kind](JSON.parse(data));
		}
		this.queue.splice(0, taken);
		this.frame = this.queue.length ? requestAnimationFrame(() => this.flush()) : null;
		if (this.isOpen) this.onstate("live");
		this.handlers.drawn();
	}

	pause() {
		clearTimeout(this.timer);
		cancelAnimationFrame(this.frame);
		this.frame = null;
		this.queue = [];
		this.reading?.abort();
	}

	close() {
		document.removeEventListener("visibilitychange", this.onvisible);
		this.pause();
	}
}
