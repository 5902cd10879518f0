"""Translate error answers of a model's server to BackendError.

The answer's text is shown in one line, and never the whole body: servers that validate fields return the request,
including the prompt.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, cast

from plait.backends.error_kinds import kind_of
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.limit_resets import seconds_left
from plait.backends.llm.endpoint import Endpoint
from plait.backends.text import parse_json

_TEXTS = ("message", "detail", "error", "msg", "errors", "status_msg", "error_msg", "reason")
"""Fields of an error with its text, or with further errors."""
_DEEPEST, _MOST = 4, 3
"""Levels of an error that are read, and the members of a list."""
_MINIMAX: Mapping[str, str] = {
    "1002": "rate_limit_error",
    "1039": "rate_limit_error",
    "1041": "rate_limit_error",
    "2045": "rate_limit_error",
    "1004": "authentication_error",
    "2049": "authentication_error",
    "1008": "insufficient_quota",
    "1026": "content_filter",
    "1027": "content_filter",
    "2013": "invalid_request_error",
}
"""The codes of `base_resp`, which MiniMax sends with status 200, in the words of others."""


def status_error(status: int, headers: Mapping[str, str], body: Any, url: str, server: Endpoint) -> BackendError:
    """Return the BackendError for an answer with an error `status` to a request of `url`.

    `body` is the value of a JSON body, and the text of any other.
    """
    words, detail = _read_body(body)
    if 300 <= status < 400:
        detail = "the server redirects; set base_url to the target of the redirect"
    hint = retry_after(headers)
    doubt = _doubt(url) if status == 404 and "model" not in detail.lower() else ""
    text = server.safe_text(f"{server.name} answered {status}: {detail}", doubt)
    wait = _asked_delay(body, detail) if hint is None else hint
    error = BackendError(kind_of(status, words, detail), text, retry_after=wait)
    error.status = status
    return error


def broken_off(body: Any, server: Endpoint, *, begun: bool) -> BackendError:
    """Return the BackendError for the error `body` within a stream; `begun` if a part of the answer had arrived.

    A rate limit or an overload then refuses no call: the server had accepted the call, and bills the call. Such an
    error is transient, so that the attempt counts.
    """
    error = _without_status(body, f"{server.name} broke off the answer", server)
    if begun and error.kind in {ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED}:
        why = error.kind.value.replace("_", " ")
        error = _without_status(body, f"{server.name} broke off the answer it had begun ({why})", server)
        error.kind = ErrorKind.TRANSIENT
    return error


def is_error(body: Any) -> bool:
    """Return whether a JSON value that came with status 200, or in a stream, is an error. An `object` named so comes
    from vLLM and Mistral, and `base_resp` from MiniMax.
    """
    if not isinstance(body, dict):
        return False
    told = cast("dict[str, Any]", body)
    if told.get("error") or told.get("object") in {"error", "Error"} or told.get("type") == "error":
        return True
    return "base_resp" in told and bool(_as_dict(told["base_resp"]).get("status_code"))


def no_answer(body: Any, url: str, server: Endpoint) -> BackendError:
    """Return the BackendError for a JSON `body` with status 200 that holds no answer."""
    return _without_status(body, f"{server.name} answered with JSON that holds no answer", server, _doubt(url))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from `retry-after-ms` or `Retry-After` (seconds or an HTTP date); None if unknown."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name) or "") * scale
        except ValueError:
            continue
        return seconds if seconds >= 0 and math.isfinite(seconds) else None
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after") or "").timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _without_status(body: Any, what: str, server: Endpoint, doubt: str = "") -> BackendError:
    words, detail = _read_body(body)
    status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
    text = server.safe_text(f"{what}: {detail}", doubt)
    return BackendError(kind_of(status, words, detail), text, retry_after=_asked_delay(body, detail))


def _doubt(url: str) -> str:
    if "/v1/v1/" in url:
        return "; leave /v1 out of base_url"
    return "" if re.search(r"/v\d|/deployments/", url) else "; is /v1 missing at the end of base_url?"


def _read_body(body: Any) -> tuple[list[str], str]:
    """Return the machine-readable words of an error body, and its text for a person."""
    error = _error_in(body)
    if not error:
        return [], body if isinstance(body, str) and body else "no reason given"
    words, said = _words_and_text(error)
    # OpenRouter: the message of the provider behind it.
    more, reason = _words_and_text(_error_in(_parsed(_as_dict(error.get("metadata")).get("raw"))))
    return words + more, ": ".join(text for text in (said, reason) if text) or "no reason given"


def _words_and_text(error: Mapping[str, Any]) -> tuple[list[str], str]:
    words = [str(error[key]) for key in ("code", "type", "status_code") if error.get(key)]
    if "status_msg" in error:
        words = [_MINIMAX.get(word, word) for word in words]
    return words, _said(error, 0)


def _said(value: Any, depth: int) -> str:
    """Return the text for a person in an error, which may be a list, or an object for each field that is wrong.

    Never the whole of it: servers that validate fields return the request, including the prompt.
    """
    if isinstance(value, str):
        parsed = _parsed(value) if value.startswith(("{", "[")) else value  # Mistral: JSON in a text
        return value if isinstance(parsed, str) else _said(parsed, depth + 1) or value
    if depth > _DEEPEST:
        return ""
    if isinstance(value, list):
        return "; ".join(filter(None, (_said(one, depth + 1) for one in _as_list(value)[:_MOST])))
    parts = _as_dict(value)
    said = next(filter(None, (_said(parts.get(key), depth + 1) for key in _TEXTS)), "")
    place = ".".join(str(step) for step in _as_list(parts.get("loc")) if isinstance(step, str | int))
    return f"{place}: {said}" if place and said else said


def _asked_delay(body: Any, message: str) -> float | None:
    """Return the seconds of `"retryDelay": "34s"`, which Gemini sends instead of a header, or those in `message`."""
    for detail in _as_list(_error_in(body).get("details")):
        found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)s", str(_as_dict(detail).get("retryDelay")))
        if found:
            return float(found[1])
    return seconds_left(message, time.time())


def _error_in(body: Any) -> dict[str, Any]:
    # Gemini returns a list.
    error = next((_as_dict(part) for part in _as_list(body) if isinstance(part, dict)), _as_dict(body))
    return _as_dict(error.get("error")) or (is_error(error) and _as_dict(error.get("base_resp"))) or error


def _parsed(raw: Any) -> Any:
    try:
        return parse_json(raw) if isinstance(raw, str) else raw
    except ValueError:
        return {"message": raw}


def _as_list(value: Any) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _as_dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
