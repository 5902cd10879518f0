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
from typing import Any

from plait.backends.error_kinds import announced_wait, kind_of, read_error
from plait.backends.models.endpoint import Endpoint
from plait.errors import BackendError, ErrorKind


def status_error(status: int, headers: Mapping[str, str], body: Any, url: str, server: Endpoint) -> BackendError:
    """Return the BackendError for an answer with an error `status` to a request of `url`.

    `body` is the value of a JSON body, and the text of any other.
    """
    words, detail = read_error(body)
    if 300 <= status < 400:
        detail = "the server redirects; set base_url to the target of the redirect"
    hint = retry_after(headers)
    doubt = _doubt(url) if status == 404 and "model" not in detail.lower() else ""
    text = server.safe_text(f"{server.name} answered {status}: {detail}", doubt)
    wait = announced_wait(body, time.time()) if hint is None else hint
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
    words, detail = read_error(body)
    status = next((int(word) for word in words if word.isdigit() and 400 <= int(word) < 600), 0)
    text = server.safe_text(f"{what}: {detail}", doubt)
    return BackendError(kind_of(status, words, detail), text, retry_after=announced_wait(body, time.time()))


def _doubt(url: str) -> str:
    if "/v1/v1/" in url:
        return "; leave /v1 out of base_url"
    return "" if re.search(r"/v\d|/deployments/", url) else "; is /v1 missing at the end of base_url?"
