"""Read usage limits, and when they end, from messages of servers and agents, which are written for people. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_UNIT = r"(?:ms|milliseconds?|d(?:ays?)?|h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)(?![a-z])"
_PART = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({_UNIT})", re.IGNORECASE)
_SPAN = re.compile(
    rf"\b(?:again|retry|resets?) (?:in|after) ((?:\d{{1,9}}(?:\.\d{{1,9}})?\s*{_UNIT}[\s,]*(?:and )?)+)", re.IGNORECASE
)
_SECONDS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_EPOCH = re.compile(r"\|(\d{10})\b")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_CLOCK = re.compile(
    r"\b(?:resets?|again) (?:on )?(?:at )?"
    rf"(?:(?P<weekday>{'|'.join(_DAYS)})[a-z]{{0,6}},? (?:at )?)?"
    rf"(?:(?P<month>{'|'.join(_MONTHS)})[a-z]{{0,6}} (?P<day>\d{{1,2}})(?:st|nd|rd|th)?,? (?:at )?"
    r"(?:(?P<year>\d{4}),? (?:at )?)?)?"
    r"(?P<hour>\d{1,2})(?=:\d| ?[ap]m)(?::(?P<minute>\d{2}))?(?: ?(?P<half>[ap])m)?\b"
    r"(?: \((?P<zone>[\w+/-]{1,40})\))?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\baccess on (\d{4}-\d\d-\d\d) at (\d\d:\d\d) UTC", re.IGNORECASE)
_NAMED = re.compile(r"\b(?:limits?|quota|usage)\b", re.IGNORECASE)
_REACHED = re.compile(
    r"\b(?:hit|reached) your (?:(?!context|token)[\w.'\u2019-]+ ){0,4}limits?\b"
    r"|\b(?:hour|daily|weekly|monthly|session|usage) limit reached\b"
    r"|\blimit reached\b\W{1,5}resets?\b",
    re.IGNORECASE,
)
"""A used-up limit, whose end may be missing: "hit your weekly limit", "reached your Fable 5 limit", "5-hour limit
reached". Not any "limit reached": the limit of a context, or of turns, does not end by waiting.
"""
_QUOTA = re.compile(r"\bquotas?\b|\b(?:daily|weekly|monthly) (?:usage |request |token )?limits?\b", re.IGNORECASE)
_MINUTE, _JUST_OVER = timedelta(minutes=1), timedelta(minutes=10)
"""A time of day without seconds covers a whole minute. A time that passed less than ten minutes ago means today, not
tomorrow: clocks differ, and a limit may end a moment later than announced.
"""


def reports_limit(text: str) -> bool:
    """Return whether `text` reports a used-up limit of an account or a model, by its words or by the time it ends."""
    text = text[:2000]
    states_end = any(form.search(text) for form in (_SPAN, _EPOCH, _DATE, _CLOCK))
    return bool(_REACHED.search(text) or (states_end and _NAMED.search(text)))


def names_quota(text: str) -> bool:
    """Return whether the `text` of a refused call names a limit that all calls of the account have reached."""
    return bool(_REACHED.search(text[:2000]) or _QUOTA.search(text[:2000]))


def seconds_left(text: str, now: float) -> float | None:
    """Return the seconds from `now` (Unix time) to the end of the limit described in `text`; None if not stated.

    A time given to the minute means the end of the minute. A time without a date is the next one, or one that passed a
    moment ago. `now` has to be the time at which the text was written.

    Known forms are "try again in 3 days 4 hours", "retry in 38.4s", "reset after 10h15m3s", "resets 3pm
    (Europe/Berlin)", "resets at 14:30", "resets Tuesday 9am (UTC)", "try again at Nov 25th, 2026 3:05 PM" (local
    time), "regain access on 2026-12-01 at 00:00 UTC", and "usage limit reached|1795000000".
    """
    text = text[:2000]
    if found := _SPAN.search(text):
        return sum(float(amount) * _SECONDS[_short(unit)] for amount, unit in _PART.findall(found[1]))
    if found := _EPOCH.search(text):
        return max(0.0, int(found[1]) - now)
    try:
        if found := _DATE.search(text):
            return max(0.0, datetime.fromisoformat(f"{found[1]}T{found[2]}Z").timestamp() - now)
        found = _CLOCK.search(text)
        return max(0.0, _moment(found, now) - now) if found else None
    except (ValueError, OverflowError, OSError):
        return None


def _short(unit: str) -> str:
    unit = unit.lower()
    return "ms" if unit.startswith(("ms", "mil")) else unit[0]


def _moment(found: re.Match[str], now: float) -> float:
    """Return the end of the minute at which the clock shows `found`, next time or a moment ago."""
    here = datetime.fromtimestamp(now, UTC).astimezone(_zone(found["zone"]))
    hour = int(found["hour"])
    if found["half"] is not None:
        hour = hour % 12 + (12 if found["half"].lower() == "p" else 0)
    then = here.replace(hour=hour, minute=int(found["minute"] or 0), second=0, microsecond=0)
    if found["month"] is None:
        step, ahead = 1, 0
        if found["weekday"] is not None:
            step, ahead = 7, (_DAYS.index(found["weekday"].lower()) - here.weekday()) % 7
        days = (then + timedelta(days=ahead + day) + _MINUTE for day in (-step, 0, step))
        return next(end for end in days if end > here - _JUST_OVER).timestamp()
    month = _MONTHS.index(found["month"].lower()) + 1
    nearest = here.year + round((here.month - month) / 12)  # a date that has just passed is not one in a year
    then = then.replace(year=int(found["year"] or nearest), month=month, day=int(found["day"]))
    return (then + _MINUTE).timestamp()


def _zone(name: str | None) -> ZoneInfo | None:
    """Return the time zone `name`; None, meaning this machine's zone, if unknown."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
