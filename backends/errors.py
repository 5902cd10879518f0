"""What went wrong with a turn, by kind. Adapters turn their SDK's errors into these; the runner alone retries."""

from __future__ import annotations

from enum import StrEnum

from plait.backends.protocol import NO_USAGE, Message, Usage


class ErrorKind(StrEnum):
    """Why a turn failed. The runner's retry policy is written in these words."""

    TRANSIENT = "transient"
    """The network or the server failed in a way that a second try may not meet: a reset, a 5xx, a cut stream."""
    RATE_LIMITED = "rate_limited"
    """Too many requests or tokens; `BackendError.retry_after` says how long to wait when the server said it."""
    OVERLOADED = "overloaded"
    """The server is up but has no room (503, 529)."""
    AUTH = "auth"
    """The key is missing, wrong, or not allowed to do this (401, 403)."""
    INVALID_REQUEST = "invalid_request"
    """The server will never accept this request as it is (400, 404, 422)."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Prompt and history do not fit into the model's context, or the answer hit its token limit."""
    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TIMEOUT = "timeout"
    """No answer within the task's or the client's time limit."""
    SESSION_LOST = "session_lost"
    """The session to go on with is not known to the backend any more."""
    CRASHED = "crashed"
    """The process behind the backend died."""
    INVALID_OUTPUT = "invalid_output"
    """The answer does not fit the asked-for schema, also after the repair turn."""
    UNAVAILABLE = "unavailable"
    """The backend cannot be had here, see `BackendUnavailable`: until a person changes that, no other try can help."""
    UNEXPECTED = "unexpected"
    """An exception that the backend did not classify, such as a bug in a function of the user's."""


class BackendError(Exception):
    """A turn failed.

    `kind` decides about a retry; `message` is one line for a person, without keys and without prompt text;
    `retry_after` is the server's own hint in seconds, or None. `usage` is what the failed turn cost all the same, and
    `messages` what was said in it, the prompt included, where there was more than the prompt. `goes_on`: the session
    has kept the prompt and what was done, so that another attempt goes on in it instead of starting over.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        retry_after: float | None = None,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
        goes_on: bool = False,
    ) -> None:
        super().__init__(message)
        self.goes_on = goes_on
        self.usage = usage
        self.messages = messages
        self.kind = kind
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


class BackendUnavailable(Exception):  # noqa: N818 - reads as what it is
    """A backend cannot be built here: an extra, a key or a file is missing. The message says what to do about it."""
