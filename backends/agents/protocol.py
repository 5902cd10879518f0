"""What differs between coding agents that are run as a command: plain values, and two protocols without any I/O.

A `Program` says how a turn is called, a `Reader` what its output means. Everything else, from the child's start to its
end, is the same for all of them: `conversation.py` on top of `backends/process/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from plait.backends.protocol import NO_USAGE, Answer, JsonValue, Output, Question, Usage
from plait.backends.values import value


@value
class Call:
    """One turn as it is to be called; the prompt comes by standard input, never here.

    `session_id` names the session: a new one, chosen by us, or None where the program makes its own; with `resume` one
    that exists. `forks` is the session that the new one branches off from. `rewind_to` is where a cut turn is taken up
    (`Reader.last_whole`). `answer` is what the question was answered with that the last turn ended with. `folder`
    exists, is private, and is the call's own.
    """

    folder: Path
    session_id: str | None = None
    resume: bool = False
    forks: str | None = None
    rewind_to: str | None = None
    output_schema: Mapping[str, object] | None = None
    answer: Answer | None = None


@value
class Ending:
    """How the child ended. `status` is its exit status, negative for a signal, None where nobody could see it;
    `stderr` the last 64 KiB of what it wrote there.
    """

    status: int | None
    stderr: str = ""


@value
class Answered:
    """A turn's whole answer. `data` is the structured answer where the program itself checked one. `usage` is that of
    this turn, or, with `is_total`, of the session so far, this turn included. `denied` lists what the agent was not
    allowed to do. `question` says that it cannot go on before somebody has answered.
    """

    text: str
    data: JsonValue = None
    usage: Usage = NO_USAGE
    is_total: bool = False
    denied: tuple[str, ...] = ()
    question: Question | None = None


class Reader(Protocol):
    """Makes sense of one turn's standard output, as it comes in. Pure; never raises on any input."""

    @property
    def session_id(self) -> str | None:
        """The session's id, once the output shows that the session exists."""
        ...

    @property
    def announced(self) -> str | None:
        """The session's id as the program announced it, whether or not the session holds the prompt by now."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether the program has said its last word: `end` may be called, the child need not be waited for."""
        ...

    @property
    def usage(self) -> Usage:
        """What is known so far of what this turn costs, for a turn that is cut."""
        ...

    @property
    def last_whole(self) -> str | None:
        """The last message that the session holds whole, as `Call.rewind_to` wants it; None where it has no such."""
        ...

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """One line of the output, which was a JSON object; what it shows of the agent's work."""
        ...

    def note(self, line: str) -> None:
        """One line of the output that was no JSON object."""
        ...

    def end(self, ending: Ending) -> Answered:
        """The turn's outcome; the child has ended, or `is_final` holds. BackendError where there is no whole answer."""
        ...


class Program(Protocol):
    """One agent's command: how it is called, and what its backend was told to do with its turns. See `CliBackend`."""

    @property
    def kind(self) -> str:
        """The backend's kind, as plans name it, such as "claude-code"."""
        ...

    @property
    def can_fork(self) -> bool:
        """Whether a session can be branched off from another one."""
        ...

    @property
    def folder(self) -> Path:
        """The folder that the agent works in."""
        ...

    @property
    def turn_timeout(self) -> float:
        """Seconds that a turn may take."""
        ...

    @property
    def idle_timeout(self) -> float:
        """Seconds that the agent may print nothing."""
        ...

    @property
    def on_runner_death(self) -> Literal["adopt", "kill"]:
        """Whether a turn goes on when this process is killed."""
        ...

    @property
    def on_lost_session(self) -> Literal["replay", "fail"]:
        """Whether a conversation is replayed in a new session when the agent has lost its own."""
        ...

    @property
    def passes(self) -> Sequence[str]:
        """Names of variables that the child may take from our environment, such as the one that holds its key."""
        ...

    @property
    def pass_env(self) -> Sequence[str]:
        """More such names, given by the user."""
        ...

    def executable(self) -> str:
        """Return the path of the command. Raises BackendUnavailable when there is none."""
        ...

    def arguments(self, call: Call) -> Sequence[str]:
        """Return the command's arguments for a turn. May write files into `call.folder`, such as a schema."""
        ...

    def environment(self, call: Call) -> Mapping[str, str]:
        """Return variables to set for the child, beside those that each child gets."""
        ...

    def says(self, call: Call, prompt: str) -> str:
        """Return the text for standard input: the prompt, unless an answer is given in another way."""
        ...

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Return whether the program itself can be asked for an answer that fits `schema`; else the prompt says it."""
        ...

    def reader(self, call: Call) -> Reader:
        """Return a reader for that turn's output."""
        ...

    def new_session_id(self) -> str | None:
        """Return an id for a new session; None where the program makes its own."""
        ...

    def session_of(self, folder: Path) -> str | None:
        """Return the session that holds the prompt of the call with its files in `folder`; None if there is none."""
        ...
