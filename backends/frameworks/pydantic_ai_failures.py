"""Translate the exceptions of a run of an agent into our kinds of errors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from plait.backends.error_kinds import kind_of, seconds_left
from plait.backends.function_backend import format_traceback, place_of
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.safe_text import one_line, without_secrets

_BY_CLASS: Mapping[str, ErrorKind] = {
    "ContentFilterError": ErrorKind.REFUSED,
    "OutputTokenLimitExceeded": ErrorKind.TRUNCATED,
    "IncompleteToolCall": ErrorKind.TRUNCATED,
    "UnexpectedModelBehavior": ErrorKind.INVALID_OUTPUT,
    "UsageLimitExceeded": ErrorKind.INVALID_REQUEST,
    "UserError": ErrorKind.INVALID_REQUEST,
    "ModelRateLimitError": ErrorKind.RATE_LIMITED,
    "ModelQuotaExceededError": ErrorKind.AUTH,
    "ModelUnavailableError": ErrorKind.OVERLOADED,
    "ModelServerError": ErrorKind.TRANSIENT,
    "ModelTimeoutError": ErrorKind.TIMEOUT,
    "ModelRequestTimeout": ErrorKind.TIMEOUT,
    "ModelConnectionError": ErrorKind.TRANSIENT,
    "ModelAuthenticationError": ErrorKind.AUTH,
    "ModelContextWindowExceededError": ErrorKind.CONTEXT_OVERFLOW,
    "ModelRequestRejectedError": ErrorKind.INVALID_REQUEST,
    "ModelAPIError": ErrorKind.TRANSIENT,
    "MCPError": ErrorKind.TRANSIENT,
    "McpError": ErrorKind.TRANSIENT,
    "ClosedResourceError": ErrorKind.TRANSIENT,
    "BrokenResourceError": ErrorKind.TRANSIENT,
    "ConnectionError": ErrorKind.TRANSIENT,
    "TimeoutError": ErrorKind.TRANSIENT,
}
"""Kinds by the name of an exception's class, the nearest class first. By name, because versions of pydantic-ai differ
in the classes that they have.
"""
_CONNECTION_CLOSED = -32000
"""The code of an MCP error that says that the server is gone. Other codes are mistakes of the model."""
_LIMIT = 400


def failure_of(error: Exception) -> BackendError:
    """Return the error of a turn that ended with `error`."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, BackendUnavailable):
        return BackendError(ErrorKind.UNAVAILABLE, str(error))
    if isinstance(error, ExceptionGroup):  # all models of a FallbackModel have failed; the last was the last hope
        return failure_of(cast("ExceptionGroup[Exception]", error).exceptions[-1])
    status = getattr(error, "status_code", None)
    status = status if type(status) is int and hasattr(error, "body") else None
    failure = BackendError(_kind_by_class(error), _text(error)) if status is None else _http_error(status, error)
    if not _is_the_librarys(error):  # of a tool, most likely
        failure = BackendError(failure.kind, failure.message + place_of(error), traceback=format_traceback(error))
    failure.retry_after = _asked_delay(error)
    return failure


def safe_line(text: str, limit: int = 300) -> str:
    """Return `text` in one line, without the values of environment variables that are named like secrets."""
    return without_secrets(one_line(text, limit))


def _text(error: Exception) -> str:
    name, detail = type(error).__name__, safe_line(str(error), _LIMIT)
    return f"{name}: {detail}" if detail else name


def _http_error(status: int, error: Any) -> BackendError:
    """Return the error of an answer with a status, to a request of the library or, without a model, of a tool."""
    detail = _detail(error.body) or str(error)
    model = getattr(error, "model_name", None)
    source = f"{type(error).__name__}: the server" if model is None else f"model {model}"
    text = f"{source} answered with status {status}: {safe_line(detail, _LIMIT)}"
    return BackendError(kind_of(status, _words(error), detail), text)


def _asked_delay(error: Exception) -> float | None:
    """Return the seconds to wait, from the server's header or else from the message of the server."""
    wait = getattr(error, "retry_after", None)
    if isinstance(wait, int | float):
        return float(wait)
    return seconds_left(_detail(getattr(error, "body", None)), time.time())


def _words(error: Any) -> list[str]:
    body: Any = error.body
    inner: Any = cast("Mapping[str, Any]", body).get("error", body) if isinstance(body, Mapping) else None
    found: list[Any] = [getattr(error, name, None) for name in ("provider_error_code", "provider_error_type")]
    if isinstance(inner, Mapping):
        fields = cast("Mapping[str, Any]", inner)
        found += [fields.get("code"), fields.get("type")]
    return [word for word in found if isinstance(word, str)]


def _detail(body: Any) -> str:
    """Return the message in the body of an error, or the whole body as text."""
    while isinstance(body, Mapping):
        fields = cast("Mapping[str, Any]", body)
        body = next((fields[name] for name in ("error", "message", "Message") if fields.get(name)), str(fields))
    return "" if body is None else str(body)


def _kind_by_class(error: Exception) -> ErrorKind:
    if any(getattr(cause, "code", None) == _CONNECTION_CLOSED for cause in _causes(error)):
        return ErrorKind.TRANSIENT
    return next((_BY_CLASS[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _BY_CLASS),
                ErrorKind.UNEXPECTED)  # fmt: skip


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        if type(error).__name__ in {"MCPError", "McpError"}:
            yield error
        error = error.__cause__


def _is_the_librarys(error: Exception) -> bool:
    return any(kind.__module__.startswith("pydantic_ai.") for kind in type(error).__mro__)
