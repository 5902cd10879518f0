// Requests to the server, and the stream of a run.

const BUDGET_MS = 8;
const RETRY_MS = 1000;

/** Return the JSON of the answer. Throws an Error with the message of the server and the `status`; 0 without an answer. */
export async function get(path, given) {
	const answer = await fetch(path, given).catch(() => null);
	const value = await answer?.json().catch(() => null);
	if (answer?.ok) return value;
	if (answer?.status === 401) window.dispatchEvent(new Event("signed-out"));
	const message = value?.error?.message || (answer ? `the server answered with status ${answer.status}` : "the server does not answer; is `plait ui` still running?");
	throw Object.assign(new Error(message), { status: answer?.status || 0 });
}

export const post = (path, body = {}) => get(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } });
export const signedIn = () => get("/api/runs?limit=1");
export const runPath = (run) => `/api/runs/${encodeURIComponent(run)}`;
export const taskPath = (run, task) => `${runPath(run)}/tasks/${encodeURIComponent(task)}`;

/** Call `load` every `ms` while the tab is seen. `onstate` receives "live", or "lost" and the reason. */
export function poll(load, ms, onstate) {
	let isOver = false;
	const now = () =>
		load().then(() => isOver || onstate("live"), (error) => isOver || error.status === 401 || onstate("lost", error.message));
	const timer = setInterval(() => document.hidden || now(), ms);
	return { now, end: () => ((isOver = true), clearInterval(timer)) };
}

/**
 * The changes of a run. A tab has one stream, closed while the tab is hidden, since a browser opens few connections to
 * a server. Each frame takes changes for BUDGET_MS at most. `onstate` receives "live", "reading" or "lost".
 */
export class Live {
	constructor(run, { task, attempts }, handlers, onstate) {
		this.path = `/page/runs/${encodeURIComponent(run)}/live?attempts=${attempts}`;
		if (task) this.path += `&task=${encodeURIComponent(task)}`;
		this.handlers = handlers;
		this.onstate = onstate;
		this.onvisible = () => (document.hidden ? this.pause() : this.open());
		document.addEventListener("visibilitychange", this.onvisible);
		this.onvisible();
	}

	open() {
		this.pause();
		this.onstate("reading");
		const source = (this.source = new EventSource(this.path));
		source.onopen = () => {
			this.queue = [];
			this.gather("opened", null);
		};
		for (const kind of ["run", "rows", "task", "activity"]) source.addEventListener(kind, ({ data }) => this.gather(kind, data));
		source.addEventListener("failed", ({ data }) => this.onstate("lost", JSON.parse(data).message));
		source.onerror = () => {
			this.onstate("lost");
			if (source.readyState === EventSource.CLOSED) this.retry();
		};
	}

	retry() {
		this.pause();
		this.timer = setTimeout(() => signedIn().then(() => this.open(), (error) => error.status !== 401 && this.retry()), RETRY_MS);
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
		if (this.source.readyState === EventSource.OPEN) this.onstate("live");
		this.handlers.drawn();
	}

	pause() {
		clearTimeout(this.timer);
		cancelAnimationFrame(this.frame);
		this.frame = null;
		this.queue = [];
		this.source?.close();
	}

	close() {
		document.removeEventListener("visibilitychange", this.onvisible);
		this.pause();
	}
}
