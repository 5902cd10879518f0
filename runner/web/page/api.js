// Requests to the server. Each change is a POST; an error has the message of the server.

export class Refused extends Error {
  constructor(status, kind, message) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

/** Return the JSON of the answer. Throws Refused; status 0 if the server cannot be reached. */
export async function call(method, path, body) {
  const given = { method, headers: { accept: "application/json" } };
  if (body !== undefined) {
    given.body = JSON.stringify(body);
    given.headers["content-type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, given);
  } catch {
    throw new Refused(0, "unreachable", "the server does not answer; is `plait ui` still running?");
  }
  let value = {};
  try {
    value = await answer.json();
  } catch {
    // an empty or broken body: the status alone counts
  }
  if (!answer.ok) {
    const error = value.error || { kind: "refused", message: `the server answered with status ${answer.status}` };
    const refused = new Refused(answer.status, error.kind, error.message);
    if (answer.status === 401) window.dispatchEvent(new CustomEvent("signed-out", { detail: refused }));
    throw refused;
  }
  return value;
}

export const get = (path) => call("GET", path);
export const post = (path, body = {}) => call("POST", path, body);
export const runPath = (run) => `/api/runs/${encodeURIComponent(run)}`;
export const taskPath = (run, task) => `${runPath(run)}/tasks/${encodeURIComponent(task)}`;

const BUDGET_MS = 8;

/**
 * The changes of a run. A tab has one stream, closed while the tab is hidden, since a browser opens few connections to
 * a server. Each frame takes changes for BUDGET_MS at most. `onstate` receives "live", "reading" or "lost".
 */
export class Live {
  constructor(run, task, handlers, onstate) {
    this.path = `/page/runs/${encodeURIComponent(run)}/live`;
    if (task) this.path += `?task=${encodeURIComponent(task)}`;
    this.handlers = handlers;
    this.onstate = onstate;
    this.queue = [];
    this.onvisible = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onvisible);
    if (!document.hidden) this.open();
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
    source.addEventListener("failed", (event) => this.onstate("lost", JSON.parse(event.data).message));
    source.onerror = () => {
      this.onstate("lost");
      if (source.readyState === EventSource.CLOSED) this.retry();
    };
  }

  retry() {
    this.pause();
    this.timer = setTimeout(async () => {
      try {
        await get("/api/runs?limit=1");
        this.open();
      } catch (error) {
        if (error.status !== 401) this.retry();
      }
    }, 1000);
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
    this.source?.close();
    this.queue = [];
  }

  close() {
    document.removeEventListener("visibilitychange", this.onvisible);
    this.pause();
  }
}
