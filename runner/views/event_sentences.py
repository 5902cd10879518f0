"""The next step for a person after the failure of a task, by the kind of the error."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import ErrorKind
from plait.runner.engine.checkpointer import NOT_STORED
from plait.runner.recovery.given_answers import DECLARED_FAILED

_LATER = "The cause is usually gone after a while: retry the failed tasks."
REMEDIES: Mapping[str, str] = {
    ErrorKind.TRANSIENT: _LATER,
    ErrorKind.RATE_LIMITED: _LATER,
    ErrorKind.OVERLOADED: _LATER,
    ErrorKind.CRASHED: "Read the message of the process, then retry the failed tasks.",
    ErrorKind.AUTH: "Check the key, the login and the credit, then retry the failed tasks.",
    ErrorKind.INVALID_REQUEST: "A retry sends the same request again: change the plan or the options of the backend.",
    ErrorKind.CONTEXT_OVERFLOW: "Shorten the prompt or the upstream results, or take another model.",
    ErrorKind.TRUNCATED: "Raise the limit of the answer (`max_tokens` of the backend), then retry the failed tasks.",
    ErrorKind.LIMIT_REACHED: "Raise `max_turns` or `max_budget_usd` of the backend, then retry the failed tasks.",
    ErrorKind.REFUSED: "Change the prompt, or take another model.",
    ErrorKind.TIMEOUT: "Raise the `timeout` of the task, then retry the failed tasks.",
    ErrorKind.SESSION_LOST: "Retry the failed tasks: the retry begins a new conversation.",
    ErrorKind.INVALID_OUTPUT: "Simplify the prompt or the schema, or take another model, then retry the failed tasks.",
    ErrorKind.UNAVAILABLE: "Install or set what the message names, then retry the failed tasks.",
    ErrorKind.UNEXPECTED: "Correct the code that the message or the traceback names, then retry the failed tasks.",
    NOT_STORED: "Mend the database, or shorten the result, as the message says, then retry the failed tasks.",
    DECLARED_FAILED: "Retry the failed tasks to run the task again.",
}
"""For each kind of error, the next step."""


def remedy(error_kind: str | None) -> str | None:
    """Return the next step after an error of the kind; None without an error, and for an unknown kind."""
    return None if error_kind is None else REMEDIES.get(error_kind)
