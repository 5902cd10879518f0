"""The kind of an error by HTTP status, error codes and message text, and the end of a usage limit. Pure.

The text for a person is never the whole body: servers that validate fields return the request, including the prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from plait.backends.json_fields import at, tables
from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import parse_json

_BY_STATUS: Mapping[int, ErrorKind] = {
    **dict.fromkeys((401, 403), ErrorKind.AUTH),
    402: ErrorKind.NO_CREDIT,
    **dict.fromkeys((408, 409, 424, 425, 499), ErrorKind.TRANSIENT),
    413: ErrorKind.CONTEXT_OVERFLOW,
    429: ErrorKind.RATE_LIMITED,
    **dict.fromkeys((498, 503, 529), ErrorKind.OVERLOADED),
}
_BY_CODE: Mapping[str, ErrorKind] = {
    **dict.fromkeys(("context_length_exceeded", "exceed_context_size_error", "request_too_large",
                     "model_max_prompt_tokens_exceeded"), ErrorKind.CONTEXT_OVERFLOW),
    **dict.fromkeys(("json_validate_failed", "output_parse_failed", "tool_use_failed"), ErrorKind.INVALID_OUTPUT),
    **dict.fromkeys(("insufficient_quota", "billing_error", "budget_exceeded", "billing_hard_limit_reached",
                     "billing_not_active", "exceeded_current_quota_error", "insufficient_user_quota", "arrearage",
                     "allocationquota.freetieronly"), ErrorKind.NO_CREDIT),
    **dict.fromkeys(("content_filter", "content_policy_violation", "invalid_prompt", "data_inspection_failed"),
                    ErrorKind.REFUSED),
}  # fmt: skip
"""Codes, in lower case, that are more specific than the HTTP status."""
_THROTTLING_CODES = (
    (ErrorKind.RATE_LIMITED, re.compile(r"rate_?limit|too_?many_?requests|throttl", re.IGNORECASE)),
    (ErrorKind.OVERLOADED, re.compile(r"overloaded|slow_down", re.IGNORECASE)),
)
"""Parts of further such codes: each server, and each way to it, has names of its own, such as `ThrottlingException`."""
_WITHOUT_STATUS: Mapping[str, ErrorKind] = {
    **dict.fromkeys(("authentication_error", "permission_error"), ErrorKind.AUTH),
    **dict.fromkeys(("invalid_request_error", "not_found_error"), ErrorKind.INVALID_REQUEST),
}
"""Codes of errors inside a stream, where no HTTP status is available."""
_OVERFLOW_PHRASES = (
    "prompt is too long", "context length", "context limit", "context size", "context window", "maximum model length",
    "maximum prompt length", "exceeds the maximum number of tokens", "exceeded model token limit", "input is too long",
    "prompt exceeds max length", "range of input length should be", "`max_new_tokens` must be <=",
)  # fmt: skip
_OF_OVERFLOWS = {0, 200, 400, 422, 500}
"""Statuses with which servers report a full context: that of llama.cpp and of Ollama is 500."""
_TOO_LARGE = "request too large"
"""In the message that a single request exceeds the tokens of a whole minute. Waiting does not help, whatever the status
and the code say.
"""
_CREDIT_PHRASES = (
    "credit balance is too low", "credit balance too low", "credits are depleted", "insufficient credits",
    "insufficient balance", "balance is insufficient", "used all available credits", "run out of credits",
    "budget has been exceeded", "key limit exceeded (total", "extra usage. add more", "from your extra usage",
    "extra usage is required",
)  # fmt: skip
_REFUSED_PHRASES = ("your input was flagged", "content exists risk", "blocked by content filtering policy")
_KEY_PHRASES = ("api key not valid", "api key expired", "incorrect api key", "invalid api key")
"""In the messages with which some servers (Gemini, xAI) answer 400 to a wrong key."""
_OF_SOME_LIMITS = {0, 200, 400, 403, 500}
"""Statuses with which some servers report a limit, or an overload, and others an error that lasts. The message decides.
"""
_THROTTLED = re.compile(
    r"too many requests|throttling ?(?:exception|error)|\bthrottled\b|(?<!disk )quota exceeded"
    r"|rate.?limit(?:ed|error| exceeded| reached)"
    r"|\bexceeded\b[^.]{0,60} rate.?limit",
    re.IGNORECASE,
)
_OVERLOADED_PHRASE = "overloaded"

_TEXTS = ("message", "detail", "error", "msg", "errors", "status_msg", "error_msg", "reason")
"""Fields of an error with its text, or with further errors."""
NO_REASON = "no reason given"
"""The text of an error without one."""
_DEEPEST, _MOST = 4, 3
"""Levels of an error that are read, and the members of a list."""
_MINIMAX: Mapping[str, str] = {
    **dict.fromkeys(("1002", "1039", "1041", "2045"), "rate_limit_error"),
    **dict.fromkeys(("1004", "2049"), "authentication_error"),
    "1008": "insufficient_quota",
    **dict.fromkeys(("1026", "1027"), "content_filter"),
    "2013": "invalid_request_error",
}
"""The codes of `base_resp`, which MiniMax sends with status 200, in the words of others."""


def kind_of(status: int, words: Sequence[str], detail: str, *, has_wait: bool = False) -> ErrorKind:
    """Return the kind of an error with HTTP `status` (0 if unknown), machine-readable `words`, and message `detail`.

    `has_wait` if a header says when to try again: a status of 403 then stands for a limit, and not for a wrong key.
    """
    lowered = detail[:2000].lower()
    if status == 413 or _TOO_LARGE in lowered:
        return ErrorKind.CONTEXT_OVERFLOW
    if any(phrase in lowered for phrase in _CREDIT_PHRASES):
        return ErrorKind.NO_CREDIT
    for word in words:
        if word.lower() in _BY_CODE:
            return _BY_CODE[word.lower()]
    for kind, code in _THROTTLING_CODES:
        if any(map(code.search, words)):
            return kind
    if status in _OF_OVERFLOWS and any(phrase in lowered for phrase in _OVERFLOW_PHRASES):
        return ErrorKind.CONTEXT_OVERFLOW
    if any(phrase in lowered for phrase in _REFUSED_PHRASES):
        return ErrorKind.REFUSED
    if status == 400 and any(phrase in lowered for phrase in _KEY_PHRASES):
        return ErrorKind.AUTH
    if status in _OF_SOME_LIMITS:
        if (has_wait and status == 403) or reports_limit(detail) or _THROTTLED.search(lowered):
            return ErrorKind.RATE_LIMITED
        if _OVERLOADED_PHRASE in lowered:
            return ErrorKind.OVERLOADED
    if status >= 300:
        return _BY_STATUS.get(status, ErrorKind.TRANSIENT if status >= 500 else ErrorKind.INVALID_REQUEST)
    return next((_WITHOUT_STATUS[word] for word in words if word in _WITHOUT_STATUS), ErrorKind.TRANSIENT)


def error_in(body: JsonValue) -> Mapping[str, JsonValue]:
    """Return the part of an answer that describes its error; empty if there is none."""
    # Gemini returns a list.
    whole = next((one for one in body if isinstance(one, dict)), None) if isinstance(body, list) else body
    for part in (at(whole, "error"), at(whole, "base_resp") if at(whole, "base_resp", "status_code") else None, whole):
        if part and isinstance(part, dict):
            return part
    return {}


def read_error(body: JsonValue) -> tuple[list[str], str]:
    """Return the machine-readable words of an error body, and its text for a person. `body` is the value of a JSON
    body, and the text of any other.
    """
    error = error_in(body)
    if not error:
        return [], body if isinstance(body, str) and body else NO_REASON
    words, message = _words_and_text(error)
    # OpenRouter: the message of the provider behind it.
    more, reason = _words_and_text(error_in(_parsed(at(error, "metadata", "raw"))))
    return words + more, ": ".join(text for text in (message, reason) if text) or NO_REASON


def _words_and_text(error: Mapping[str, JsonValue]) -> tuple[list[str], str]:
    words = [str(error[key]) for key in ("code", "type", "status_code") if error.get(key)]
    if "status_msg" in error:
        words = [_MINIMAX.get(word, word) for word in words]
    return words, error_text(error)


def error_text(value: JsonValue | Mapping[str, JsonValue], depth: int = 0) -> str:
    """Return the text for a person in an error, which may be a list, or an object for each field that is wrong; empty
    if there is none.
    """
    if isinstance(value, str):
        parsed = _parsed(value) if value.startswith(("{", "[")) else value  # Mistral: JSON in a text
        return value if isinstance(parsed, str) else error_text(parsed, depth + 1) or value
    if depth > _DEEPEST or not isinstance(value, list | Mapping):
        return ""
    if isinstance(value, list):
        return "; ".join(filter(None, (error_text(one, depth + 1) for one in value[:_MOST])))
    text = next(filter(None, (error_text(at(value, key), depth + 1) for key in _TEXTS)), "")
    steps = at(value, "loc")
    place = ".".join(str(step) for step in steps if isinstance(step, str | int)) if isinstance(steps, list) else ""
    return f"{place}: {text}" if place and text else text


def _parsed(raw: JsonValue) -> JsonValue:
    try:
        return parse_json(raw) if isinstance(raw, str) else raw
    except ValueError:
        return {"message": raw}


# Exceptions of the client libraries that the code of users calls: each has classes of its own, with an HTTP status.

_PASSING = frozenset({ErrorKind.TRANSIENT, ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED, ErrorKind.NO_CREDIT})
_LOST_CONNECTIONS = frozenset(
    {"ConnectionError", "TimeoutError", "APIConnectionError", "TransportError", "ClientConnectionError"}
)
"""Names of the exceptions of Python, and the libraries of vendors, httpx and aiohttp, for a connection that failed."""


def passing_failure(error: BaseException, now: float) -> tuple[ErrorKind, float | None] | None:
    """Return the kind of a limit, an overload, or a failure of a server or a connection that `error`, or the cause of
    `error`, reports, and the seconds to wait if stated; None for any other exception. `now` is the Unix time.
    """
    causes: tuple[Any, Any] = error, error.__cause__
    for cause in causes:
        response: Any = getattr(cause, "response", None)
        if status := _status_of(cause, response):
            bodies: list[Any] = [getattr(cause, name, None) for name in ("body", "details")]
            body: JsonValue = next((one for one in bodies if type(one) in {dict, list, str}), None)
            words, detail = read_error(body)
            detail = str(cause) if detail == NO_REASON else detail
            headers: Any = getattr(cause, "headers", None) or getattr(response, "headers", None)
            wait = retry_after(headers, now) if hasattr(headers, "get") else None
            kind = kind_of(status, words, detail, has_wait=wait is not None)
            wait = wait if wait is not None else announced_wait(body, now) or seconds_left(detail, now)
            return (kind, wait) if kind in _PASSING else None
        if any(base.__name__ in _LOST_CONNECTIONS for base in type(cause).__mro__):
            return ErrorKind.TRANSIENT, None
    return None


def _status_of(error: Any, response: Any) -> int:
    """Return the HTTP status of an exception, or of the response that the exception holds; 0 if there is none."""
    candidates = [getattr(error, name, None) for name in ("status_code", "status", "code")]
    candidates += [
        getattr(response, "status_code", None),
        at(response, "ResponseMetadata", "HTTPStatusCode"),
    ]  # botocore
    return next((int(one) for one in candidates if isinstance(one, int) and 400 <= one < 600), 0)


# Usage limits, and when they end, in messages of servers and agents, which are written for people.

_UNIT = r"(?:ms|milliseconds?|w(?:eeks?)?|d(?:ays?)?|h(?:ours?|rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?)(?![a-z])"
_PART = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({_UNIT})", re.IGNORECASE)
_SPAN = re.compile(
    rf"\b(?:(?:again|retry|resets?) (?:in|after)|wait) ((?:\d{{1,9}}(?:\.\d{{1,9}})?\s*{_UNIT}[\s,]*(?:and )?)+)",
    re.IGNORECASE,
)
_SECONDS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_EPOCH = re.compile(r"\|(\d{10})\b")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_CLOCK = re.compile(
    r"\b(?:resets?|again) (?:on )?(?:at )?"
    rf"(?:(?P<weekday>{'|'.join(_DAYS)})[a-z]{{0,6}},? (?:at )?|(?P<tomorrow>tomorrow),? (?:at )?)?"
    rf"(?:(?P<month>{'|'.join(_MONTHS)})[a-z]{{0,6}} (?P<day>\d{{1,2}})(?:st|nd|rd|th)?,? (?:at )?"
    r"(?:(?P<year>\d{4}),? (?:at )?)?)?"
    r"(?:(?P<hour>\d{1,2})(?=:\d| ?[ap]m)(?::(?P<minute>\d{2}))?(?: ?(?P<half>[ap])m)?|(?P<word>midnight|noon))\b"
    r"(?: \((?P<zone>[\w+/-]{1,40})\)| (?P<bare_zone>UTC|GMT|[A-Z]\w{1,20}/\w{1,20})\b)?",
    re.IGNORECASE,
)
_DATE = re.compile(r"\baccess on (\d{4}-\d\d-\d\d) at (\d\d:\d\d) UTC", re.IGNORECASE)
_STAMP = re.compile(
    r"\b(?:resets?|again|until) (?:on |at:? )?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)"
    r"(?: ?(Z|UTC|[+-]\d\d:\d\d))?",
    re.IGNORECASE,
)
_NAMED = re.compile(r"\b(?:limits?|quota|usage)\b", re.IGNORECASE)
_REACHED = re.compile(
    r"\b(?:hit|reached) your (?:(?!context|token)[\w.'\u2019()-]+ ){0,4}limits?\b|\bkey limit exceeded\b"
    r"|\b(?:hour|daily|weekly|monthly|session|usage|spend|spending) limit reached\b"
    r"|\blimit reached\b\W{1,5}resets?\b",
    re.IGNORECASE,
)
"""A used-up limit, whose end may be missing: "hit your weekly limit", "reached your Fable 5 limit", "5-hour limit
reached". Not any "limit reached": the limit of a context, or of turns, does not end by waiting.
"""
_QUOTA = re.compile(
    r"\bquotas?\b|\bper[ -]day\b|\b(?:daily|weekly|monthly) (?:usage |request |token )?limits?\b", re.IGNORECASE
)
_MINUTE, _JUST_OVER = timedelta(minutes=1), timedelta(minutes=10)
"""A time of day without seconds covers a whole minute. A time that passed less than ten minutes ago means today, not
tomorrow: clocks differ, and a limit may end a moment later than announced.
"""


def reports_limit(text: str) -> bool:
    """Return whether `text` reports a used-up limit of an account or a model, by its words or by the time it ends."""
    text = text[:2000]
    states_end = any(form.search(text) for form in (_SPAN, _EPOCH, _DATE, _STAMP, _CLOCK))
    return bool(_REACHED.search(text) or (states_end and _NAMED.search(text)))


def names_quota(text: str) -> bool:
    """Return whether the `text` of a refused call names a limit that all calls of the account have reached."""
    return bool(_REACHED.search(text[:2000]) or _QUOTA.search(text[:2000]))


def seconds_left(text: str, now: float) -> float | None:
    """Return the seconds from `now` (Unix time) to the end of the limit described in `text`; None if not stated.

    A time given to the minute means the end of the minute. A time without a date is the next one, or one that passed a
    moment ago. `now` has to be the time at which the text was written.

    Known forms are "try again in 3 days 4 hours", "retry in 38.4s", "reset after 10h15m3s", "wait 30 seconds", "resets
    3pm (Europe/Berlin)", "resets at 14:30", "resets at midnight UTC", "resets tomorrow at 9am", "resets Tuesday 9am
    (UTC)", "try again at Nov 25th, 2026 3:05 PM" (local time), "resets at 2026-12-01T00:00:00Z", "regain access on
    2026-12-01 at 00:00 UTC", and "usage limit reached|1795000000".
    """
    text = text[:2000]
    if match := _SPAN.search(text):
        return sum(float(amount) * _SECONDS[_short(unit)] for amount, unit in _PART.findall(match[1]))
    if match := _EPOCH.search(text):
        return max(0.0, int(match[1]) - now)
    try:
        if match := _DATE.search(text):
            return max(0.0, datetime.fromisoformat(f"{match[1]}T{match[2]}Z").timestamp() - now)
        if match := _STAMP.search(text):
            zone = "Z" if (match[2] or "").upper() in {"Z", "UTC"} else match[2] or ""
            return max(0.0, datetime.fromisoformat(match[1] + zone).timestamp() - now)
        match = _CLOCK.search(text)
        return max(0.0, _moment(match, now) - now) if match else None
    except (ValueError, OverflowError, OSError):
        return None


def announced_wait(body: JsonValue, now: float) -> float | None:
    """Return the seconds to wait after the error `body`; None if not stated: `"retryDelay": "34s"`, which Gemini sends
    instead of a header, the end of a limit of OpenRouter, in milliseconds of Unix time, or the words of the text.
    """
    error = error_in(body)
    for detail in tables(error, "details"):
        if match := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)s", str(detail.get("retryDelay"))):
            return float(match[1])
    if match := re.fullmatch(r"(\d{10})\d{3}", str(at(error, "metadata", "headers", "X-RateLimit-Reset"))):
        return max(0.0, float(match[1]) - now)
    return seconds_left(read_error(body)[1], now)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` (seconds or an HTTP date); None if unknown."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name) or "") * scale
        except ValueError:
            continue
        return seconds if seconds >= 0 and math.isfinite(seconds) else None
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - rarely needed

    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after") or "").timestamp() - now)
    except (TypeError, ValueError, OverflowError):
        return None


def _short(unit: str) -> str:
    unit = unit.lower()
    return "ms" if unit.startswith(("ms", "mil")) else unit[0]


def _moment(match: re.Match[str], now: float) -> float:
    """Return the end of the minute at which the clock shows `match`, next time or a moment ago."""
    here = datetime.fromtimestamp(now, UTC).astimezone(_zone(match["zone"] or match["bare_zone"]))
    hour = int(match["hour"] or (0 if (match["word"] or "").lower() == "midnight" else 12))
    if match["half"] is not None:
        hour = hour % 12 + (12 if match["half"].lower() == "p" else 0)
    then = here.replace(hour=hour, minute=int(match["minute"] or 0), second=0, microsecond=0)
    if match["month"] is None:
        step, ahead = 1, 0
        if match["tomorrow"] is not None:
            return (then + timedelta(days=1) + _MINUTE).timestamp()
        if match["weekday"] is not None:
            step, ahead = 7, (_DAYS.index(match["weekday"].lower()) - here.weekday()) % 7
        days = (then + timedelta(days=ahead + day) + _MINUTE for day in (-step, 0, step))
        return next(end for end in days if end > here - _JUST_OVER).timestamp()
    month = _MONTHS.index(match["month"].lower()) + 1
    nearest = here.year + round((here.month - month) / 12)  # a date that has just passed is not one in a year
    then = then.replace(year=int(match["year"] or nearest), month=month, day=int(match["day"]))
    return (then + _MINUTE).timestamp()


def _zone(name: str | None) -> ZoneInfo | None:
    """Return the time zone `name`; None, meaning this machine's zone, if unknown."""
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
