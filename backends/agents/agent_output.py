"""The output of coding agents: the `Reader` of one turn, which each agent has, the events in a line, the kinds of the
errors in their words; and the files of the output, read again later.

Everything else, from starting the agent to its end, is common to all agents: `cli_agent.py`.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from json import dumps
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast

from plait.backends.agents.agent_catalog import backend_class
from plait.backends.backend_protocol import ConversationRequest, Output
from plait.backends.error_kinds import kind_of, read_error, reports_limit
from plait.backends.json_fields import at, text
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Lines
from plait.backends.process.files_and_locks import private_folder
from plait.backends.whole_answer import kind_of_reason
from plait.dialogue import Answer, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, as_json, from_json, value
from plait.safe_text import clean_text, header_values, masked, parse_json, shown
from plait.usage import NO_USAGE, Usage


@value
class AgentCall:
    """One call of an agent's command. The prompt is not part of the call, but goes to standard input."""

    folder: Path
    """Private folder of this call. Exists before the call."""
    session_id: str | None = None
    """With `resume`, an existing session; otherwise the id chosen for a new session, None if the program makes its own
    ids.
    """
    resume: bool = False
    """Continue the existing session `session_id`."""
    forks: str | None = None
    """Session from which the new session branches."""
    rewind_to: str | None = None
    """Message at which an interrupted turn is continued (`Reader.last_whole`)."""
    output_schema: Mapping[str, object] | None = None
    """JSON Schema to be enforced by the program itself."""
    answer: Answer | None = None
    """Answer to the question that ended the last reply."""
    max_budget_usd: float | None = None
    """Limit of the call in US dollars, raised by a person; None for the backend's own limit."""
    written_at: float | None = None
    """Unix time of the last output, if the call was over before this process read any of it; None otherwise."""


@value
class ProcessEnd:
    """The end of the child process."""

    status: int | None
    """Exit status, negative for a signal; None if unknown."""
    stderr: str = ""
    """The last 64 KiB of standard error."""
    stdout: Sequence[str] = ()
    """The last lines of standard output that are no events: they may hold the reason."""


@value
class TurnAnswer:
    """The answer of a turn that has ended as it should."""

    text: str
    """The text of the turn's last message."""
    data: JsonValue = None
    """The structured answer, if checked by the program itself."""
    usage: Usage = NO_USAGE
    """Usage of the turn; with `is_total`, of the whole session including the turn."""
    is_total: bool = False
    question: Question | None = None
    """Question to answer before the session can continue."""
    reasons: Sequence[str] = ()
    """The reasons for the end of the answer, if the program reports any."""


class Reader(Protocol):
    """Interprets the standard output of one turn as it arrives. Pure; never raises on any input."""

    @property
    def session_id(self) -> str | None:
        """The session's id, once the output shows that the session holds the prompt; None before."""
        ...

    @property
    def announced(self) -> str | None:
        """The session's id as announced by the program, even if the session does not hold the prompt yet."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether the output is complete: `end` may be called without waiting for the child to exit. A later line may
        begin a new part of the output.
        """
        ...

    @property
    def usage(self) -> Usage:
        """Usage of the turn so far, for a turn that is interrupted."""
        ...

    @property
    def last_text(self) -> str:
        """Text of the last message of the model so far, for an answer that is cut; empty if there is none."""
        ...

    @property
    def last_whole(self) -> str | None:
        """Id of the last message held whole by the session, for `AgentCall.rewind_to`; None if there is none."""
        ...

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event of the output, and return the outputs in it."""
        ...

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the outcome of the turn, once the child has ended or `is_final` holds.

        Raises BackendError if the turn has failed. Whether the answer is whole is decided by `whole_turn`.
        """
        ...


# An agent writes one JSON object a line. Around an object there may be what a terminal would interpret and nobody would
# see: codes for its title, colours and modes, and a spinner. Text before an object is more than that in a log line,
# which quotes an event but is none.

_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_CODE = re.compile(
    # A text for the terminal itself, such as its title: up to BEL or ST, or at least up to an event.
    r"\x1b[\]PX^_](?:[^\x07\x1b]*(?:\x07|\x1b\\)|[^\x07\x1b{]*(?=\{\s*\"))"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]+")
"""Control characters, which JSON never holds but as white space."""
_OBJECT = re.compile(r'\{[\x00-\x20]*["}]')
_SPINNER = re.compile(
    r"\s*(?:"
    # A sign, but no arrow, and perhaps words: "⠋ Thinking".
    r"(?:[|/\\*+.\-]|[^\x00-\x7f\w\u2190-\u21ff\u27f0-\u27ff\u2900-\u297f\xab\xbb])+(?:\s.*)?"
    r"|\w.*(?:\.\.\.|\u2026)\s*"  # "Working..."
    r")?",
    re.DOTALL,
)
_LIKE_AN_EVENT = re.compile(r'\{\s*"|"(?:type|jsonrpc)"\s*:')


@value
class OutputLine:
    """A line of output."""

    events: Sequence[Mapping[str, JsonValue]]
    """The JSON objects in the line; mostly one."""
    words: str
    """The line as text without terminal codes, if it holds no event; the message of an event that is an error and
    nothing else; empty otherwise.
    """

    @property
    def is_unread_event(self) -> bool:
        """Whether the line holds no event, but looks as if it should."""
        return not self.events and _LIKE_AN_EVENT.search(self.words) is not None


def read_line(line: bytes) -> OutputLine:
    """Return the events in a line of output, or its text."""
    content = line.decode("utf-8", "replace").strip()
    events: list[Mapping[str, JsonValue]] = []
    if content.startswith("{"):
        with suppress(ValueError):
            events = _objects(parse_json(content))
    if not events:
        events = _among_noise(content)
    if events:
        return OutputLine(events, "\n".join(filter(None, map(_reason, events))))
    return OutputLine((), plain(content).strip("\ufeff \n\t"))


def plain(output: str) -> str:
    """Return text without terminal codes and control characters, but for the ends of lines."""
    lines = output.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(" ", _CODE.sub("", lines))


def _among_noise(line: str) -> list[Mapping[str, JsonValue]]:
    """Return the objects in a line that is not one object and nothing else."""
    # Codes but colours move what follows to another place, as a carriage return does.
    visible, at, is_clean = _CODE.sub("\r", _COLOUR.sub("", line)), 0, False
    events: list[Mapping[str, JsonValue]] = []
    while begin := _OBJECT.search(visible, at):
        before = _CONTROL.split(visible[at : begin.start()])[-1]
        if not _SPINNER.fullmatch(before):
            break
        try:
            event, at = _TOLERANT.raw_decode(visible, begin.start())
        except (ValueError, RecursionError):
            if is_clean:
                break
            visible, at, is_clean = _CONTROL.sub("", visible[begin.start() :]), 0, True  # a code inside of the object
            continue
        events += _objects(event)
    return events


def _objects(one: JsonValue) -> list[Mapping[str, JsonValue]]:
    return [one] if isinstance(one, dict) else []


def _reason(event: Mapping[str, JsonValue]) -> str:
    """Return the message of an event that is an error and nothing else."""
    if text(event, "type") not in {"", "error"} or "jsonrpc" in event or "id" in event:
        return ""
    return text(event, "error", "message") or text(event, "message") or text(event, "error")


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _whole(digits: str) -> int | None:
    return int(digits) if len(digits) < 400 else None


_TOLERANT = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite, parse_int=_whole)
"""Reads a number that is none, or that is too large to count with, as null: an event is worth more than one count."""


# The messages of agents about their errors, as our kinds of errors.

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
    for name, setting in environment.items():
        if "HEADERS" in name.upper():
            secrets += header_values(setting)
        elif any(word in name.upper() for word in _SECRET):
            secrets.append(setting.strip())
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


# The output of turns, read again with the same readers: by a later attempt, or shown to a person (`TurnWatch`).
#
# <turn>/NUMBER/stdout     the output of a call; `child.json` beside it names the agent
# <turn>/placed.jsonl      the output of a turn on another host, one output a line, with its time

R = TypeVar("R", bound=Reader)
_REPORTED = "reported"
"""File beside a call's output. Its existence means: the call's failure and cost were reported to the runner."""


def mark_reported(folder: Path) -> None:
    """Mark the call's failure and cost as reported to the runner: no later attempt counts the cost again."""
    with suppress(OSError):
        (folder / _REPORTED).touch(mode=0o600)


def exchanges(turn: Path) -> list[Path]:
    """Return the folders of a turn's calls, in order. Most turns make one call."""
    return [folder for folder in _numbered(turn) if read_manifest(folder) is not None]


def outputs_of(line: OutputLine, read: Callable[[Mapping[str, JsonValue]], Sequence[Output]]) -> Sequence[Output]:
    """Return the outputs in a line, whose events are passed to `read`."""
    if line.is_unread_event:
        return [Output("notice", f"not read, though it looks like an event: {safe_line(line.words)}"[:140])]
    return [output for event in line.events for output in read(event)]


def reread(reader: R, folder: Path) -> R:
    """Pass all existing output of a child to `reader`, and return the reader."""

    def on_line(line: bytes) -> bool:
        outputs_of(read_line(line), reader.read)
        return False

    with suppress(OSError), (folder / "stdout").open("rb", buffering=0) as output:
        lines = Lines(output.read, on_line)
        while lines.pump():
            pass
        lines.flush()
    return reader


@value
class UnreportedCall:
    """A call of an interrupted attempt, whose cost was never reported."""

    folder: Path
    reader: Reader
    is_cut: bool
    """Whether the call itself was interrupted."""


def cut_before(turn: Path, make: Callable[[Path], Reader]) -> list[UnreportedCall]:
    """Return the calls of the interrupted attempts just before the attempt in folder `turn`, the last call first."""
    unreported: list[UnreportedCall] = []
    for attempt in earlier(turn):
        calls = exchanges(attempt)
        if not calls or (calls[-1] / _REPORTED).exists():
            break
        cut = [UnreportedCall(one, reread(make(one), one), one == calls[-1]) for one in reversed(calls)]
        if cut[0].reader.is_final:
            break
        unreported += cut
    return unreported


def earlier(turn: Path) -> Iterator[Path]:
    """Yield the folders of the attempts before the attempt in folder `turn`, the last attempt first."""
    own = int(turn.name) if turn.name.isdigit() else 0
    yield from reversed([folder for folder in _numbered(turn.parent) if int(folder.name) < own])


def noted_before(request: ConversationRequest, turn: Path, name: str) -> JsonValue:
    """Return what the interrupted or adopted turn that this turn goes on with noted as `name`; None if nothing."""
    attempts: Sequence[Path] = ()
    if request.attaches:
        attempts = [turn]
    elif request.resumes_interrupted:
        attempts = list(earlier(turn))[:1]
    for call in (call for attempt in attempts for call in exchanges(attempt)):
        manifest = read_manifest(call)
        if manifest is not None and name in manifest.note:
            with suppress(ValueError):
                return parse_json(manifest.note[name])
    return None


def _numbered(folder: Path) -> list[Path]:
    try:
        entries = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError:
        return []
    return sorted(entries, key=lambda entry: int(entry.name))


PLACED = "placed.jsonl"


def place_output(turn: Path, output: Output, *, begins: bool) -> None:
    """Append an output of a turn on another host to the file in the turn's folder; `begins` to write the file anew.

    The host sends all output again when a turn is followed anew. The lines then have the same lengths as before, so a
    reader in another process continues at the same place. Raises OSError.
    """
    line = {"timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z", "output": as_json(output)}
    private_folder(turn)
    with (turn / PLACED).open("wb" if begins else "ab") as file:
        file.write(dumps(line).encode() + b"\n")


def placed_output(event: Mapping[str, JsonValue]) -> Sequence[Output]:
    """Return the output in a line that `place_output` wrote. Never raises on any input."""
    with suppress(ValueError):
        return (from_json(Output, at(event, "output")),)
    return ()


_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


@value
class TimedOutput:
    """An output with its time."""

    output: Output
    at: str | None
    """Time of the output in UTC and ISO 8601; None if the agent does not report a time."""
    since: str | None
    """Last time reported before the output; None if none was reported."""


class TurnWatch:
    """Shows a turn from its files, while the agent works or later, in any process. The folder need not exist yet.

    Output of an unknown kind of agent is shown line by line, as text. Memory is bounded, regardless of the amount of
    output. The watch has to be closed.
    """

    def __init__(self, turn: Path) -> None:
        self._turn = turn
        self._calls = 0
        self._streams: list[Lines] = []
        """The output of the current call; for an unknown kind, standard error as well."""
        self._files: dict[Path, BinaryIO] = {}
        self._outputs_in: Callable[[Mapping[str, JsonValue]], Sequence[Output]] | None = None
        """Returns the outputs in an event; None for output of an unknown kind."""
        self._since: str | None = None
        self._outputs: deque[TimedOutput] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether the agent is working on the turn."""
        calls = exchanges(self._turn)
        manifest = read_manifest(calls[-1]) if calls else None
        return manifest is not None and manifest.is_alive

    def peek(self) -> TimedOutput | None:
        """Return the next output; None if there is none at present."""
        while not self._outputs and self._read():
            pass
        return self._outputs[0] if self._outputs else None

    def take(self) -> TimedOutput:
        """Return the next output and advance. Raises IndexError if there is none at present."""
        self.peek()
        return self._outputs.popleft()

    def finish(self) -> None:
        """Treat the output as complete: an unterminated last line is read too."""
        for lines in self._streams:
            while lines.pump():
                pass
            lines.flush()
            if lines.skipped:
                self._show(Output("notice", f"output lines skipped as too long: {lines.skipped}"), None)
                lines.skipped = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read(self) -> bool:
        """Read a piece. Return False if nothing is left to read at present."""
        if sum(lines.pump() for lines in self._streams):
            return True
        calls = exchanges(self._turn)
        if not calls and not self._streams and (self._turn / PLACED).exists():  # the turn runs on another host
            self._outputs_in = placed_output
            self._follow(self._turn / PLACED)
            return True
        if len(calls) <= self._calls:
            return False
        self.finish()  # another call was made, so the current call is over
        self.close()
        folder = calls[self._calls]
        manifest = read_manifest(folder)
        backend = None if manifest is None else backend_class(manifest.note.get("kind", ""))
        reader = None if backend is None else cast("Reader", backend.transcript_reader(folder))
        self._calls += 1
        self._outputs_in, self._since = None if reader is None else reader.read, None
        self._follow(folder / "stdout", *([folder / "stderr"] if reader is None else []))
        return True

    def _follow(self, *paths: Path) -> None:
        self._streams = [Lines(partial(self._more, path), self._on_line) for path in paths]

    def _more(self, path: Path, size: int) -> bytes:
        if path not in self._files:
            with suppress(OSError):  # the file does not exist yet, or was removed
                self._files[path] = path.open("rb", buffering=0)
        return (self._files[path].read(size) or b"") if path in self._files else b""

    def _on_line(self, line: bytes) -> bool:
        if self._outputs_in is None:
            self._show(Output("text", clean_text(line.decode("utf-8", "replace")) + "\n"), None)
            return False
        output_line = read_line(line)
        at = next(filter(None, map(_time_of, output_line.events)), None)
        self._since = at or self._since
        for output in outputs_of(output_line, self._outputs_in):
            self._show(output, at)
        return False

    def _show(self, output: Output, at: str | None) -> None:
        self._outputs.append(TimedOutput(output, at, self._since))


def _time_of(event: Mapping[str, JsonValue]) -> str | None:
    time = event.get("timestamp")
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        return None
    try:
        datetime.fromisoformat(time)
    except ValueError:
        return None
    return time
