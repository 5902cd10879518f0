"""Errors of a turn, by kind. Adapters translate their SDK's errors into these kinds; only the runner retries."""

from __future__ import annotations

from enum import StrEnum

from plait.backends.protocol import NO_USAGE, Message, Usage


class ErrorKind(StrEnum):
    """The cause of a failed turn. The runner's retry policy is written in terms of these kinds."""

    TRANSIENT = "transient"
    """The network or the server failed in a way that a second attempt may not meet: a reset, a 5xx, a cut stream."""
    RATE_LIMITED = "rate_limited"
    """Too many requests or tokens. `BackendError.retry_after` is the wait requested by the server, if any."""
    OVERLOADED = "overloaded"
    """The server is up but has no room (503, 529)."""
    AUTH = "auth"
    """The key is missing, wrong, or lacks the permission (401, 403)."""
    INVALID_REQUEST = "invalid_request"
    """The server will never accept the request unchanged (400, 404, 422)."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Prompt and history do not fit into the model's context, or the answer hit its token limit."""
    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TIMEOUT = "timeout"
    """No answer within the task's or the client's time limit."""
    SESSION_LOST = "session_lost"
    """The backend no longer has the session to continue."""
    CRASHED = "crashed"
    """The process behind the backend died."""
    INVALID_OUTPUT = "invalid_output"
    """The answer does not fit the requested schema, even after the repair turn."""
    UNAVAILABLE = "unavailable"
    """The backend is unavailable on this machine, see `BackendUnavailable`. Retrying is useless until a person fixes
    the cause.
    """
    UNEXPECTED = "unexpected"
    """An exception that the backend did not classify, such as a bug in a user's function."""


class BackendError(Exception):
    """A failed turn.

    - `kind` decides whether the runner retries.
    - `message` is one line for a person, without keys and without prompt text.
    - `retry_after` is the server's own hint in seconds, or None.
    - `usage` is the cost of the failed turn.
    - `messages` are the turn's messages, including the prompt; empty if the prompt was the only message.
    - `continues_session` says that the session holds the prompt and the work done: the next attempt goes on there.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        retry_after: float | None = None,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
        continues_session: bool = False,
    ) -> None:
        super().__init__(message)
        self.continues_session = continues_session
        self.usage = usage
        self.messages = messages
        self.kind = kind
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


class BackendUnavailable(Exception):  # noqa: N818 - reads as what it is
    """A backend cannot be built: an extra, a key or a file is missing. The message says how to fix the cause."""
