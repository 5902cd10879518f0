"""Common functions of the adapters on a vendor's SDK: find the SDK and the key, and translate the SDK's errors.

An SDK's error is never chained to a BackendError: the error holds the request, whose headers hold the key, and the
server's text, which may repeat the key.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, cast
from urllib.parse import urlsplit

from plait.backends.error_kinds import kind_of
from plait.backends.errors import BackendError, BackendUnavailable, ErrorKind
from plait.backends.text import check_base_url, header_values, masked, one_line, parse_json

NO_KEY = "none"
"""Sent as the key to servers without a key, because the SDKs require a key."""

_HEADERS = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The destination of requests. Messages show the `name` only, and never the key."""

    url: str
    key: str = field(repr=False)

    def safe_text(self, text: str, doubt: str = "") -> str:
        """Return `text` as one line followed by the whole of `doubt`.

        The key and the values of headers added by the environment are masked.
        """
        headers = [value for name in _HEADERS for value in header_values(os.environ.get(name, ""))]
        return one_line(masked(text, [self.key, *headers]), 300 - len(doubt)) + doubt

    @property
    def name(self) -> str:
        """Host and port."""
        parts = urlsplit(self.url)
        host = parts.hostname or self.url
        try:
            return f"{host}:{parts.port}" if parts.port else host
        except ValueError:
            return host


def read_key(variable: str, *, needed: bool) -> str:
    """Return the key in environment variable `variable`; NO_KEY if the variable is empty and no key is needed.

    Raises BackendUnavailable if a needed key is missing, or the key is malformed.
    """
    key = os.environ.get(variable, "").strip()
    if key.isascii() and key.isprintable() and key:
        return key
    if key:
        raise BackendUnavailable(
            f"the key in {variable} holds characters not allowed in a key; was the key copied completely?"
        )
    if needed:
        raise BackendUnavailable(f"no key: set {variable}, or name a server that needs none by base_url (--base-url)")
    return NO_KEY


def find_server(url: str, variable: str, *, key_needed: bool) -> Endpoint:
    """Return the server at `url`, with the key in environment variable `variable`.

    Raises BackendUnavailable if `url` is not a URL, holds a user or password, or a needed key is missing.
    """
    try:
        check_base_url(url, f"the environment variable {variable}")
    except ValueError as error:
        raise BackendUnavailable(str(error)) from None
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise BackendUnavailable("base_url has to be like http://host:8080/v1: a scheme, a host, perhaps port and path")
    return Endpoint(url, read_key(variable, needed=key_needed))


def is_environments(url: str, variable: str, default: str) -> bool:
    """Return whether `url` is the URL in environment variable `variable`, or `default` if the variable is not set."""
    return url.rstrip("/") == (os.environ.get(variable) or default).rstrip("/")


def forget_environment(client: Any, omit: object) -> None:
    """Remove from an SDK's `client` the headers taken from the environment; `omit` is the SDK's marker for an absent
    header.
    """
    # No argument keeps the SDK from reading the headers. A version that stores the headers elsewhere must not send them
    # unnoticed.
    if "_custom_headers" not in vars(client):
        raise RuntimeError("plait cannot find the headers in this version of the SDK")
    client._custom_headers = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), omit)


def translate(exc: Exception, server: Endpoint) -> BackendError:
    """Return the BackendError for an exception raised by an SDK call."""
    status: Any = getattr(exc, "status_code", None)
    if isinstance(status, int):
        return _status_error(exc, status, server)
    name = type(exc).__name__
    if name == "APITimeoutError" or isinstance(exc, TimeoutError) or "Timeout" in name:
        return BackendError(ErrorKind.TIMEOUT, server.safe_text(f"{server.name} did not answer in time"))
    cause = exc.__cause__
    if name == "APIConnectionError" or _is_http(exc):
        detail = f"{type(cause).__name__}: {cause}" if cause is not None else f"{name}: {exc}"
        return BackendError(ErrorKind.TRANSIENT, server.safe_text(f"the connection to {server.name} failed: {detail}"))
    if hasattr(exc, "body"):  # an error event inside a stream
        return broken_off(cast("Any", exc).body, server)
    # json.JSONDecodeError is a ValueError: the SDKs do not convert it.
    kind = ErrorKind.TRANSIENT if isinstance(exc, ValueError) else ErrorKind.UNEXPECTED
    return BackendError(kind, server.safe_text(f"the answer of {server.name} cannot be read: {name}: {exc}"))


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


def _status_error(exc: Any, status: int, server: Endpoint) -> BackendError:
    words, detail = _read_body(exc.body)
    if 300 <= status < 400:
        detail = "the server redirects; set base_url to the target of the redirect"
    kind = kind_of(status, words, detail)
    hint = retry_after(exc.response.headers)
    # Inside a stream the status is still the initial 200.
    said = f"{server.name} answered {status}" if status >= 300 else f"{server.name} broke off the answer"
    doubt = _doubt(exc.response) if status == 404 and "model" not in detail.lower() else ""
    wait = _asked_delay(exc.body) if hint is None else hint
    return BackendError(kind, server.safe_text(f"{said}: {detail}", doubt), retry_after=wait)


def broken_off(body: Any, server: Endpoint) -> BackendError:
    """Return the BackendError for the error `body` received within a stream."""
    return _without_status(body, f"{server.name} broke off the answer", server)


async def expect_events(response: Any, server: Endpoint) -> None:
    """Raise BackendError if an SDK's `response` with status 200 is JSON instead of a stream.

    The error contains the server's own message, or says that the server does not stream.
    """
    if not response.headers.get("content-type", "").startswith("application/json"):
        return
    try:
        body = parse_json((await response.aread()).decode())
    except ValueError:  # events with a wrong content type
        return
    whole = _as_dict(body)
    if whole.get("choices") or whole.get("content"):
        text = f"{server.name} answered in one piece although it was asked to stream; plait needs a server that streams"
        raise BackendError(ErrorKind.INVALID_REQUEST, text)
    raise _without_status(body, f"{server.name} answered with JSON in place of a stream", server, _doubt(response))


def _without_status(body: Any, what: str, server: Endpoint, doubt: str = "") -> BackendError:
    words, detail = _read_body(body)
    status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
    text = server.safe_text(f"{what}: {detail}", doubt)
    return BackendError(kind_of(status, words, detail), text, retry_after=_asked_delay(body))


def _doubt(response: Any) -> str:
    path: str = response.request.url.path
    if "/v1/v1/" in path:
        return "; leave /v1 out of base_url"
    return "" if re.search(r"/v\d", path) else "; is /v1 missing at the end of base_url?"


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
    words = [str(error[key]) for key in ("code", "type") if error.get(key)]
    # Never the whole body: servers that validate fields return the request, including the prompt.
    return words, next((error[key] for key in ("message", "detail", "error") if isinstance(error.get(key), str)), "")


def _asked_delay(body: Any) -> float | None:
    """Return the seconds of `"retryDelay": "34s"`, which Gemini sends instead of a header."""
    for detail in _as_list(_error_in(body).get("details")):
        found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)s", str(_as_dict(detail).get("retryDelay")))
        if found:
            return float(found[1])
    return None


def _error_in(body: Any) -> dict[str, Any]:
    # Gemini returns a list.
    error = next((_as_dict(part) for part in _as_list(body) if isinstance(part, dict)), _as_dict(body))
    return _as_dict(error.get("error")) or error


def _parsed(raw: Any) -> Any:
    try:
        return parse_json(raw) if isinstance(raw, str) else raw
    except ValueError:
        return {"message": raw}


def _as_list(value: Any) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _as_dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_http(exc: Exception) -> bool:
    # httpx or httpx2, depending on the SDK's version.
    return type(exc).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2", "anyio"}
