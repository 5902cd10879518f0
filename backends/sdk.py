"""What the adapters on a vendor's SDK share: finding the SDK and the key, and turning its errors into our kinds.

An SDK's own error is never chained to ours: it holds the request, whose headers hold the key, and the server's words,
which may repeat it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import Any, cast
from urllib.parse import urlsplit

from .errors import BackendError, BackendUnavailable, ErrorKind
from .text import one_line

NO_KEY = "none"
"""Sent as the key to servers that need none; the SDKs insist on one."""

_BY_STATUS: Mapping[int, ErrorKind] = {
    401: ErrorKind.AUTH,
    402: ErrorKind.AUTH,
    403: ErrorKind.AUTH,
    408: ErrorKind.TRANSIENT,
    409: ErrorKind.TRANSIENT,
    413: ErrorKind.CONTEXT_OVERFLOW,
    429: ErrorKind.RATE_LIMITED,
    503: ErrorKind.OVERLOADED,
    529: ErrorKind.OVERLOADED,
}
_BY_CODE: Mapping[str, ErrorKind] = {
    "context_length_exceeded": ErrorKind.CONTEXT_OVERFLOW,
    "exceed_context_size_error": ErrorKind.CONTEXT_OVERFLOW,
    "insufficient_quota": ErrorKind.AUTH,
    "billing_error": ErrorKind.AUTH,
    "content_filter": ErrorKind.REFUSED,
    "content_policy_violation": ErrorKind.REFUSED,
    "overloaded_error": ErrorKind.OVERLOADED,
    "rate_limit_error": ErrorKind.RATE_LIMITED,
    "rate_limit_exceeded": ErrorKind.RATE_LIMITED,
}
"""Codes that say more than the status they come with."""
_WITHOUT_STATUS: Mapping[str, ErrorKind] = {
    "authentication_error": ErrorKind.AUTH,
    "permission_error": ErrorKind.AUTH,
    "invalid_request_error": ErrorKind.INVALID_REQUEST,
    "not_found_error": ErrorKind.INVALID_REQUEST,
}
"""Codes of errors inside a stream, which come with no status of their own."""
_HEADERS = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")
_OVERFLOW_PHRASES = ("prompt is too long", "context length", "context limit", "context size", "context window")
_QUOTA_PHRASES = ("credit balance is too low",)


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. Messages show its `name` only: `url` may hold a password, and the key is never shown."""

    url: str
    key: str = field(repr=False)

    def say(self, text: str) -> str:
        """`text` as one line without the key and the values of headers that the environment adds."""
        for secret in (self.key, *_header_values()):
            # What is this short is a stand-in for a key, and may be any word.
            if len(secret) >= 8:
                text = text.replace(secret, "***")
        return one_line(text)

    @property
    def name(self) -> str:
        """Host and port."""
        parts = urlsplit(self.url)
        host = parts.hostname or self.url
        try:
            return f"{host}:{parts.port}" if parts.port else host
        except ValueError:
            return host


def require(module: str, extra: str) -> None:
    """BackendUnavailable, naming the extra, when `module` is not installed. Nothing is imported."""
    if find_spec(module) is None:
        raise BackendUnavailable(f"the {module} package is not installed; run: pip install 'plait[{extra}]'")


def read_key(variable: str, *, needed: bool) -> str:
    """The key in environment variable `variable`; NO_KEY when there is none and none is needed."""
    key = os.environ.get(variable, "").strip()
    if key.isascii() and key.isprintable() and key:
        return key
    if key:
        raise BackendUnavailable(f"the key in {variable} holds characters that no key has; was it copied whole?")
    if needed:
        raise BackendUnavailable(f"no key: set {variable}, or name a server that needs none by base_url (--base-url)")
    return NO_KEY


def find_server(url: str, variable: str, *, key_needed: bool) -> Server:
    """The server at `url`, with the key in environment variable `variable`. BackendUnavailable for what is no URL."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise BackendUnavailable("base_url has to be like http://host:8080/v1: a scheme, a host, perhaps port and path")
    return Server(url, read_key(variable, needed=key_needed))


def is_environments(url: str, variable: str, default: str) -> bool:
    """Whether `url` is where environment variable `variable` points, or `default` where that is not set."""
    return url.rstrip("/") == (os.environ.get(variable) or default).rstrip("/")


def forget_environment(client: Any, omit: object) -> None:
    """Have an SDK's `client` send no header that it took from the environment; `omit` is the SDK's word for none."""
    # No argument prevents that they are read. A version that keeps them elsewhere must not send them unseen.
    if "_custom_headers" not in vars(client):
        raise RuntimeError("this version of the SDK keeps its headers where plait does not find them")
    client._custom_headers = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), omit)


def _header_values() -> list[str]:
    """The longest first: where one holds another, nothing of it is left."""
    lines = [line for variable in _HEADERS for line in os.environ.get(variable, "").split("\n")]
    values = [value.strip() for _, _, value in (line.partition(":") for line in lines)]
    # A server may name the token alone, without the "Bearer" before it.
    words = [value.rpartition(" ")[2] for value in values]
    return sorted({*values, *words}, key=len, reverse=True)


def translate(exc: Exception, server: Server) -> BackendError:
    """The BackendError for anything that an SDK call raised."""
    status: Any = getattr(exc, "status_code", None)
    if isinstance(status, int):
        return _status_error(exc, status, server)
    name = type(exc).__name__
    if name == "APITimeoutError" or isinstance(exc, TimeoutError) or "Timeout" in name:
        return BackendError(ErrorKind.TIMEOUT, server.say(f"{server.name} did not answer in time"))
    cause = exc.__cause__
    if name == "APIConnectionError" or _is_http(exc):
        detail = f"{type(cause).__name__}: {cause}" if cause is not None else f"{name}: {exc}"
        return BackendError(ErrorKind.TRANSIENT, server.say(f"the connection to {server.name} failed: {detail}"))
    if hasattr(exc, "body"):  # an error event inside a stream
        return _stream_error(exc, server)
    # json.JSONDecodeError is among the ValueErrors: the SDKs let it through.
    kind = ErrorKind.TRANSIENT if isinstance(exc, ValueError) else ErrorKind.UNEXPECTED
    return BackendError(kind, server.say(f"the answer of {server.name} cannot be read: {name}: {exc}"))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks to wait, from `retry-after-ms` or `Retry-After` (seconds or an HTTP date)."""
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


def _status_error(exc: Any, status: int, server: Server) -> BackendError:
    words, detail = _read_body(exc)
    if 300 <= status < 400:
        detail = "it redirects; give the address it redirects to as base_url"
    kind = kind_of(status, words, detail)
    hint = retry_after(exc.response.headers)
    # Inside a stream the status is still the 200 that it began with.
    said = f"{server.name} answered {status}" if status >= 300 else f"{server.name} broke off the answer"
    return BackendError(kind, server.say(f"{said}: {detail}"), retry_after=hint)


def _stream_error(exc: Any, server: Server) -> BackendError:
    words, detail = _read_body(exc)
    status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
    return BackendError(kind_of(status, words, detail), server.say(f"{server.name} broke off the answer: {detail}"))


def _read_body(exc: Any) -> tuple[list[str], str]:
    """The machine-readable words of an error body, and its text for a person."""
    error = _as_dict(exc.body)
    error = _as_dict(error.get("error")) or error
    if not error:
        return [], str(exc.body or "no reason given")
    words = [str(error[key]) for key in ("code", "type") if error.get(key)]
    said = next((error[key] for key in ("message", "detail", "error") if isinstance(error.get(key), str)), None)
    # Never the whole body: servers that check its fields send back the request, prompt and all.
    return words, said or "no reason given"


def _as_dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def kind_of(status: int, words: Sequence[str], detail: str) -> ErrorKind:
    """The kind of an error with HTTP `status` (0 where none is known), machine-readable `words`, and text `detail`."""
    for word in words:
        if word in _BY_CODE:
            return _BY_CODE[word]
    lowered = detail[:2000].lower()
    if status in {0, 200, 400} and any(phrase in lowered for phrase in _OVERFLOW_PHRASES):
        return ErrorKind.CONTEXT_OVERFLOW
    if any(phrase in lowered for phrase in _QUOTA_PHRASES):
        return ErrorKind.AUTH
    if status >= 300:
        return _BY_STATUS.get(status, ErrorKind.TRANSIENT if status >= 500 else ErrorKind.INVALID_REQUEST)
    return next((_WITHOUT_STATUS[word] for word in words if word in _WITHOUT_STATUS), ErrorKind.TRANSIENT)


def _is_http(exc: Exception) -> bool:
    # httpx or httpx2, by the SDK's version.
    return type(exc).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2", "anyio"}
