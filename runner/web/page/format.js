// Numbers and times for people.

export const count = (number) => number.toLocaleString("en-US");

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return tokens with three digits: 950, 12.3k, 4.56M. */
export function tokens(number) {
  if (!number) return "";
  if (number < 1000) return String(number);
  const [value, unit] = number < 999_500 ? [number / 1000, "k"] : [number / 1e6, "M"];
  return value.toPrecision(value < 100 ? (value < 10 ? 2 : 3) : 3).replace(/\.0+$/, "") + unit;
}

export function cost(dollars, partial) {
  if (dollars === null || dollars === undefined) return "";
  return (partial ? "≥ " : "") + "$" + (dollars === 0 || dollars >= 0.095 ? dollars.toFixed(2) : Number(dollars.toPrecision(2)));
}

/** Return seconds as 40 ms, 1.2 s, 12 s, 3 min 05 s, 2 h 10 min, 3 d 4 h. */
export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (value < 1) return `${Math.round(Math.max(value, 0) * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

export const time = (at) => (at ? Date.parse(at) : NaN);

/** Return how long ago `at` was: 5 s ago, 3 min ago, 2 h ago, or the day. */
export function ago(at, now = Date.now()) {
  const since = (now - time(at)) / 1000;
  if (Number.isNaN(since)) return "";
  if (since < 60) return `${Math.max(0, Math.round(since))} s ago`;
  if (since < 3600) return `${Math.round(since / 60)} min ago`;
  if (since < 86_400) return `${Math.round(since / 3600)} h ago`;
  return new Date(at).toLocaleDateString([], { day: "numeric", month: "short", year: "numeric" });
}

/** Return the local time, with the day unless it is today. */
export function clock(at) {
  if (!at) return "";
  const moment = new Date(at);
  const today = moment.toDateString() === new Date().toDateString();
  const hours = moment.toLocaleTimeString([], { hour12: false });
  return today ? hours : `${moment.toLocaleDateString([], { day: "numeric", month: "short" })} ${hours}`;
}

/** Return the time that a run or an attempt has taken. */
export function elapsed(from, to, now = Date.now()) {
  if (!from) return "";
  return seconds(((to ? time(to) : now) - time(from)) / 1000);
}

export const json = (value) => JSON.stringify(value, null, 2);
