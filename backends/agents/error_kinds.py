"""What agents say when a turn fails, as errors of our kinds. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from plait.backends.agents.protocol import Ending
from plait.backends.error_kinds import kind_of
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.json_fields import text
from plait.backends.protocol import NO_USAGE, Usage
from plait.backends.text import header_values, masked, parse_json, shown

Phrases: TypeAlias = Sequence[tuple[str, ErrorKind]]
"""What a message in lower case contains, and what that means; the first that fits holds."""

COMMON: Phrases = (
    ("usage limit", ErrorKind.RATE_LIMITED),
    ("hit your limit", ErrorKind.RATE_LIMITED),
    ("rate limit", ErrorKind.RATE_LIMITED),
    ("prompt is too long", ErrorKind.CONTEXT_OVERFLOW),
    ("context window", ErrorKind.CONTEXT_OVERFLOW),
    ("exceeds the maximum length", ErrorKind.CONTEXT_OVERFLOW),
    ("usage policy", ErrorKind.REFUSED),
    ("not logged in", ErrorKind.AUTH),
    ("please run /login", ErrorKind.AUTH),
    ("invalid api key", ErrorKind.AUTH),
)
NETWORK = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("NODE_EXTRA_CA_CERTS", "SSL_CERT_DIR", "SSL_CERT_FILE"),
)
"""Variables that say how the network is reached; every agent may have them."""
_KEYS = re.compile(r"\b(?:sk-|AIza|gh[opsu]_|github_pat_|eyJ)[\w.-]{8,}|\bBearer +\S+")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_BELOW = (" ", "\t", "Node.js v", "Bun v", "note: run with")
"""How lines begin that say nothing of what went wrong: where it did, and with which version."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_STATUS = re.compile(r'(?:\bstatus|\bAPI Error|"code)"?:? *(?:code )?([45]\d\d)\b', re.IGNORECASE)


class SchemaRefused(BackendError):  # noqa: N818
    """The program, or its server, does not take the schema that it was given; nothing was done."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.INVALID_REQUEST, said(message))


def classify(message: str, phrases: Phrases, status: int = 0, words: Sequence[str] = ()) -> ErrorKind:
    """The kind of the error that `message` tells of, with its HTTP `status` and its machine-readable `words`, where
    they are known.
    """
    status = status or status_in(message)
    return _by_phrase(message, phrases) or kind_of(status, words, message)


def judged(message: str, phrases: Phrases) -> tuple[ErrorKind, str]:
    """Kind and message of what a program says of a failed request, which is the server's whole answer where that was a
    400.
    """
    try:
        body = parse_json(message)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return classify(message, phrases), message
    told = text(body, "error", "message") or text(body, "message") or "the server takes the request for invalid"
    return classify(told, phrases, 400, [text(body, "error", "code")]), told


def status_in(message: str) -> int:
    """The HTTP status that `message` names; 0 where there is none."""
    found = _STATUS.search(message[:2000])
    return int(found[1]) if found else 0


def failure(
    kind: ErrorKind, message: str, *, wait: float | None = None, usage: Usage = NO_USAGE, goes_on: bool = False
) -> BackendError:
    """The error. `wait` counts for limits alone, and nobody goes on in a session that is lost."""
    hint = wait if kind in {ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED} else None
    kept = goes_on and kind is not ErrorKind.SESSION_LOST
    return BackendError(kind, said(message), retry_after=hint, usage=usage, goes_on=kept)


def said(message: str) -> str:
    """`message` in one line, without what looks like a key."""
    return shown(_KEYS.sub("***", message[:4000]), 300)


def hide(error: BackendError, given: Mapping[str, str]) -> None:
    """Mask in `error` the values of those variables, of all that were `given` to the agent, that hold secrets."""
    secrets: list[str] = []
    for name, value in given.items():
        if "HEADERS" in name.upper():
            secrets += header_values(value)
        elif any(word in name.upper() for word in _SECRET):
            secrets.append(value.strip())
    error.message = masked(error.message, secrets)
    error.args = (error.message,)


def no_outcome(program: str, ending: Ending, phrases: Phrases, noise: tuple[str, ...] = ()) -> tuple[ErrorKind, str]:
    """Kind and message for a `program` that ended without a word about its turn, but perhaps one on stderr, where the
    lines that begin with `noise` say nothing.
    """
    told = (line for line in _COLOURS.sub("", ending.stderr).splitlines() if not line.startswith(noise))
    lines = [line for line in told if any(map(str.isalnum, line))]
    if ending.status is None or ending.status >= 0:
        for line in reversed(lines):
            if kind := _by_phrase(line, phrases):
                return kind, f"{program}: {line}"
    # What a runtime adds to an error stands below it.
    telling = [line for line in lines if not line.startswith(_BELOW)] or lines
    last = f": {telling[-1]}" if telling else ""
    return ErrorKind.CRASHED, f"{program} {_how(ending.status)} before its turn was over{last}"


def _by_phrase(message: str, phrases: Phrases) -> ErrorKind | None:
    lowered = message[:2000].lower()
    return next((kind for phrase, kind in phrases if phrase in lowered), None)


def _how(status: int | None) -> str:
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
