"""Translate error messages of agents into `ErrorKind`s. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from plait.backends.agents.agent_output import ProcessEnd, plain
from plait.backends.error_kinds import kind_of, read_error, reports_limit
from plait.backends.whole_answer import kind_of_reason
from plait.errors import BackendError, ErrorKind
from plait.safe_text import header_values, masked, parse_json, shown
from plait.usage import NO_USAGE, Usage

THROTTLED = "temporarily limiting requests"
"""Part of a message, in lower case, that says that the server has no room at the moment."""
_PHRASES: Sequence[tuple[ErrorKind, Sequence[str]]] = (
    # The message to continue from is not in the session file; the session was opened from an index, its file is gone.
    (ErrorKind.SESSION_LOST, ("no conversation found", "no message found with message.uuid", "no rollout found",
                              "missing source rollout", "thread not found")),
    # Another process holds the session, or held it a moment ago.
    (ErrorKind.TRANSIENT, ("already in use", "active writer")),
    (ErrorKind.INVALID_REQUEST, ("\nerror: unknown option", "\nerror: unexpected argument", "\nerror: invalid value",
                                 "\nerror: --json-schema is not", "\nerror loading config",
                                 "is invalid. allowed choices", "configuration value not found",
                                 "not inside a trusted directory", "root/sudo privileges")),
    (ErrorKind.NO_CREDIT, ("quota exceeded. check your plan", "out of credits", "credit balance is too low")),
    (ErrorKind.AUTH, ("with your chatgpt plan, upgrade", "missing environment variable")),
    (ErrorKind.REFUSED, ("was flagged", "request was blocked")),
    (ErrorKind.OVERLOADED, (THROTTLED,)),
    (ErrorKind.RATE_LIMITED, ("usage limit", "rate limit")),
    (ErrorKind.CONTEXT_OVERFLOW, ("prompt is too long", "context window", "exceeds the maximum length")),
    (ErrorKind.OVERLOADED, ("at capacity",)),
    (ErrorKind.REFUSED, ("usage policy",)),
    (ErrorKind.AUTH, ("not logged in", "please run /login", "please log in", "log in again", "invalid api key",
                      "incorrect api key", "api key not valid", "missing api key", "no api key", "token has expired",
                      "authentication failed", "authentication_error", "unauthorized")),
)  # fmt: skip
"""Parts of the messages of all agents in lower case, and the kind of each. The first match counts. A part that begins
with a line end stands at the start of a line: a model, or a tool, may quote an option parser in the middle of one.
"""
_LIMITS = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
WORDS: Mapping[str, ErrorKind] = {
    **dict.fromkeys(("authentication_failed", "account_on_hold", "verification_required", "cloud_credential_error",
                     "oauth_org_not_allowed"), ErrorKind.AUTH),
    "billing_error": ErrorKind.NO_CREDIT,
    "rate_limit": ErrorKind.RATE_LIMITED,
    "overloaded": ErrorKind.OVERLOADED,
    **dict.fromkeys(("invalid_request", "model_not_found"), ErrorKind.INVALID_REQUEST),
}  # fmt: skip
"""Claude Code's words for errors without an HTTP status, which its adapter for ACP uses too."""
_KEYS = re.compile(r"\b(?:sk-|AIza|gh[opsu]_|github_pat_|eyJ)[\w.-]{8,}|\bBearer +\S+")
_BELOW = (" ", "\t", "Node.js v", "Bun v", "note: run with")
"""Starts of lines that say where an error occurred, or in which version, but not its cause."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_REASON = re.compile(r"\breason: (\w{1,60})\W{0,10}\Z")
"""The reason for the end of an answer, which is the end of the message."""
_STATUS = re.compile(r'(?:\bstatus|\bAPI Error|"code)"?:? *(?:code )?([45]\d\d)\b', re.IGNORECASE)


class SchemaRefused(BackendError):  # noqa: N818
    """The program or its server rejected the schema; nothing was done."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID_REQUEST, safe_line(message))


def by_phrase(message: str, status: int = 0) -> ErrorKind | None:
    """Return the kind of the error in `message` by the words of agents; None if they say nothing known."""
    lowered = f"\n{message[:2000].lower()}"
    kind = next((kind for kind, phrases in _PHRASES if any(phrase in lowered for phrase in phrases)), None)
    if kind is ErrorKind.REFUSED and (limit := kind_of(status or status_in(message), (), message)) in _LIMITS:
        return limit  # such as "429 Too Many Requests, see our usage policy": a limit is a wait
    reason = None if kind else _REASON.search(message[-100:].lower())
    return kind_of_reason(reason[1]) if reason else kind


def classify(message: str, status: int = 0, words: Sequence[str] = ()) -> ErrorKind:
    """Return the kind of the error in `message`, given its HTTP `status` and machine-readable `words` if known."""
    status = status or status_in(message)
    return by_phrase(message, status) or kind_of(status, words, message)


def kind_of_failure(message: str) -> tuple[ErrorKind, str]:
    """Return kind and message of a failed request, as reported by a program.

    For HTTP status 400 a program reports the server's whole answer as JSON.
    """
    try:
        body = parse_json(message)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return classify(message), message
    words, reason = read_error(body)
    return classify(reason, 400, words), reason


def status_in(message: str) -> int:
    """Return the HTTP status named in `message`; 0 if none."""
    match = _STATUS.search(message[:2000])
    return int(match[1]) if match else 0


def failure(
    kind: ErrorKind,
    message: str,
    *,
    wait: float | None = None,
    usage: Usage = NO_USAGE,
    continues_session: bool = False,
) -> BackendError:
    """Return the error. `wait` counts only for limits; `continues_session` is ignored for a lost session."""
    hint = wait if kind in _LIMITS else None
    continues = continues_session and kind is not ErrorKind.SESSION_LOST
    return BackendError(kind, safe_line(message), retry_after=hint, usage=usage, continues_session=continues)


def safe_line(message: str) -> str:
    """Return `message` in one line, with anything that looks like a key masked."""
    return shown(_KEYS.sub("***", message[:4000]), 300)


def hide(error: BackendError, environment: Mapping[str, str]) -> None:
    """Mask in `error` the values of secret variables in the agent's `environment`."""
    secrets: list[str] = []
    for name, value in environment.items():
        if "HEADERS" in name.upper():
            secrets += header_values(value)
        elif any(word in name.upper() for word in _SECRET):
            secrets.append(value.strip())
    error.message = masked(error.message, secrets)
    error.args = (error.message,)


def no_outcome(program: str, ending: ProcessEnd, noise: tuple[str, ...] = ()) -> tuple[ErrorKind, str]:
    """Return kind and message for a `program` that ended without reporting an outcome.

    The message comes from what the program said, on stderr or as plain text on stdout. Lines that start with `noise`
    are ignored.
    """
    errors, printed = _telling(plain(ending.stderr), noise), _telling("\n".join(ending.stdout), noise)
    if ending.status is None or ending.status >= 0:
        for line in (*reversed(errors), *reversed(printed)):
            if kind := by_phrase(line) or (ErrorKind.RATE_LIMITED if reports_limit(line) else None):
                return kind, f"{program}: {line}"
        for line in reversed(printed):
            if kind := _by_status(line):
                return kind, f"{program}: {line}"
    # The last line that says why: lines added by a runtime follow the error itself.
    causes = ([line for line in lines if not line.startswith(_BELOW)] or lines for lines in (errors, printed))
    reasons = [f": {line}" for lines in causes for line in lines[-1:]]
    return ErrorKind.CRASHED, f"{program} {_manner(ending.status)} before its turn was over{''.join(reasons)}"


def _telling(text: str, noise: tuple[str, ...]) -> Sequence[str]:
    return [line for line in text.splitlines() if not line.startswith(noise) and any(map(str.isalnum, line))]


def _by_status(line: str) -> ErrorKind | None:
    """Return the kind of an error by the HTTP status or the words of the server in a line; None for other lines."""
    status = status_in(line)
    kind = kind_of(status, (), line)
    return kind if status or kind is not ErrorKind.TRANSIENT else None


def _manner(status: int | None) -> str:
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
