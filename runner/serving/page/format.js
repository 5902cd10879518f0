// Numbers, times and addresses for people.

export const count = (number) => number.toLocaleString("en-US");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Whether all questions of the run are answered, and no process runs it. */
export const isAnswered = (run) => run.status === "waiting_input" && !run.counts.waiting_input;

/** The statuses of a run that no process runs. */
export const RESUMABLE = ["interrupted", "waiting_input", "queued"];

export const words = (status) => status.replace("_", " ");

export const json = (value) => JSON.stringify(value, null, 2);

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
export const tokens = (number) => (number ? COMPACT.format(number).replace("K", "k") : "");

export const inOut = (one) => one.input_tokens + one.output_tokens > 0 && `${tokens(one.input_tokens)} in, ${tokens(one.output_tokens)} out`;

/** "≥" marks a sum with unknown parts. */
export function cost({ cost_usd: dollars, cost_is_partial: partial }) {
	if ((dollars ?? null) === null) return partial ? "cost unknown" : "";
	return (partial ? "≥ $" : "$") + (dollars === 0 || dollars >= 0.095 ? dollars.toFixed(2) : Number(dollars.toPrecision(2)));
}

/** 40 ms, 1.2 s, 12 s, 3 min 05 s, 2 h 10 min, 3 d 04 h. */
export function seconds(value) {
	if (Number.isNaN(value ?? NaN)) return "";
	if (value < 1) return `${Math.round(Math.max(value, 0) * 1000)} ms`;
	if (value < 10) return `${value.toFixed(1)} s`;
	const whole = Math.round(value);
	if (whole < 60) return `${whole} s`;
	const [large, name, small, rest] = whole < 3600 ? [60, "min", 1, "s"] : whole < 172_800 ? [3600, "h", 60, "min"] : [86_400, "d", 3600, "h"];
	return `${Math.floor(whole / large)} ${name} ${String(Math.floor((whole % large) / small)).padStart(2, "0")} ${rest}`;
}

export const time = (at) => (at ? Date.parse(at) : NaN);

export function clock(at) {
	if (!at) return "";
	const moment = new Date(at);
	const day = moment.toDateString() === new Date().toDateString() ? "" : `${moment.toLocaleDateString([], { day: "numeric", month: "short" })} `;
	return day + moment.toLocaleTimeString([], { hour12: false });
}

export const elapsed = (run) => seconds(((time(run.ended_at) || Date.now()) - time(run.started_at)) / 1000);

/** Return the text, cut to `width` if a character takes `wide`. */
export const cut = (text, width, wide) => (text.length * wide <= width ? text : `${text.slice(0, Math.max(1, Math.floor(width / wide) - 1))}…`);

export const addressOf = (run, task) => `#/run/${encodeURIComponent(run)}${task ? `/task/${encodeURIComponent(task)}` : ""}`;
