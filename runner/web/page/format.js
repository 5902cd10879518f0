// Numbers, times and addresses for people.

export const count = (number) => number.toLocaleString("en-US");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export const words = (status) => status.replace("_", " ");

export const json = (value) => JSON.stringify(value, null, 2);

/** Return tokens with three digits: 950, 12.3k, 4.56M. */
export function tokens(number) {
  if (!number) return "";
  if (number < 1000) return String(number);
  const [value, unit] = number < 999_500 ? [number / 1000, "k"] : [number / 1e6, "M"];
  return value.toPrecision(value < 10 ? 2 : 3).replace(/\.0+$/, "") + unit;
}

/** Return tokens of input and output. */
export const inOut = (one) => one.input_tokens + one.output_tokens > 0 && `${tokens(one.input_tokens)} in, ${tokens(one.output_tokens)} out`;

/** Return dollars; "≥" marks a sum with unknown parts. */
export function cost(dollars, partial) {
  if (dollars === null || dollars === undefined) return "";
  return (partial ? "≥ $" : "$") + (dollars === 0 || dollars >= 0.095 ? dollars.toFixed(2) : Number(dollars.toPrecision(2)));
}

/** Return seconds as 40 ms, 1.2 s, 12 s, 3 min 05 s, 2 h 10 min, 3 d 4 h. */
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (value < 1) return `${Math.round(Math.max(value, 0) * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h ${two((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export const time = (at) => (at ? Date.parse(at) : NaN);

/** Return how long ago `at` was: 5 s ago, 3 min ago, 2 h ago, or the day. */
export function ago(at) {
  const since = (Date.now() - time(at)) / 1000;
  if (since < 60) return `${Math.max(0, Math.round(since))} s ago`;
  if (since < 3600) return `${Math.round(since / 60)} min ago`;
  if (since < 86_400) return `${Math.round(since / 3600)} h ago`;
  return new Date(at).toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}

/** Return the local time, with the day unless it is today. */
export function clock(at) {
  if (!at) return "";
  const moment = new Date(at);
  const day = moment.toDateString() === new Date().toDateString() ? "" : `${moment.toLocaleDateString([], { day: "numeric", month: "short" })} `;
  return day + moment.toLocaleTimeString([], { hour12: false });
}

/** Return the time that a run has taken. */
export const elapsed = (run) => seconds(((time(run.ended_at) || Date.now()) - time(run.started_at)) / 1000);

/** Return `text`, cut to `width` if a character takes `wide` of it. */
export const cut = (text, width, wide) => (text.length * wide <= width ? text : `${text.slice(0, Math.max(1, Math.floor(width / wide) - 1))}…`);

/** Return the address of a run on the page, or of one of its tasks. */
export const addressOf = (run, task) => `#/run/${encodeURIComponent(run)}${task ? `/task/${encodeURIComponent(task)}` : ""}`;
