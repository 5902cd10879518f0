"""Errors of a turn, by kind. Adapters translate their SDK's errors into these kinds; only the runner retries."""

from __future__ import annotations

from enum import StrEnum

from plait.dialogue import Message
from plait.usage import NO_USAGE, Usage


class ErrorKind(StrEnum):
    """The cause of a failed turn. The runner's retry policy is written in terms of these kinds."""

    TRANSIENT = "transient"
    """Network trouble, 408, 409, 425, 5xx, or an answer that broke off, has an unknown end, or cannot be read."""
    RATE_LIMITED = "rate_limited"
    """429: too many requests or tokens. `BackendError.retry_after` is the wait requested by the server, if any."""
    OVERLOADED = "overloaded"
    """498, 503, 529, or a model that is still loading: the server is up but has no room."""
    AUTH = "auth"
    """The key is missing, wrong, or lacks the permission (401, 403), or no credit is left."""
    INVALID_REQUEST = "invalid_request"
    """400, 404, 422, a redirect, or an invalid schema: the server will never accept the request unchanged."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Prompt and history do not fit into the model's context, or are more than the server takes at once (413)."""
    TRUNCATED = "truncated"
    """The answer reached a limit of its length. `BackendError.messages` holds the text that arrived."""
    LIMIT_REACHED = "limit_reached"
    """An agent reached a limit of the plan for its turn: model requests, or US dollars that a person did not raise."""
    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TIMEOUT = "timeout"
    """No whole answer within the task's or the client's time limit."""
    SESSION_LOST = "session_lost"
    """The backend no longer has the session to continue."""
    CRASHED = "crashed"
    """The process behind the backend died."""
    INVALID_OUTPUT = "invalid_output"
    """The answer is empty, calls a tool that nobody offered, does not fit the requested schema, also after the repair
    turn, or cannot be checked in time.
    """
    UNAVAILABLE = "unavailable"
    """The backend is unavailable on this machine (`BackendUnavailable`): an extra, a key, a file or a
    command is missing. Retrying is useless until a person fixes the cause.
    """
    UNEXPECTED = "unexpected"
    """An exception of a user's function, or an exception that the backend did not classify. A `ConnectionError` or
    `TimeoutError` of a function is `transient`.
    """


class BackendError(Exception):
    """A failed turn, by `kind`. To a caller of the runner, only `continue_task` raises the error.

    - `kind` decides whether the runner retries.
    - `message` is one line for a person, without keys and without prompt text.
    - `retry_after` is the server's own hint in seconds, or None.
    - `status` is the HTTP status of the answer, or None; an attribute alone.
    - `usage` is the cost of the failed turn.
    - `messages` are the turn's messages, including the prompt; empty if the prompt was the only message.
    - `traceback` is the traceback of the user's code that failed, as Python prints it, or None.
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
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.continues_session = continues_session
        self.usage = usage
        self.messages = messages
        self.kind = kind
        self.message = message
        self.retry_after = retry_after
        self.status: int | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


class BackendUnavailable(Exception):  # noqa: N818 - reads as what it is
    """A backend cannot be built: an extra, a key or a file is missing. The message says how to fix the cause."""
