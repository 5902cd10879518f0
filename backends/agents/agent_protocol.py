"""What the output of coding agents differs in: plain values, and the `Reader` of one turn's output, without any I/O.

Everything else, from starting the agent to its end, is common to all agents: `cli_agent.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from plait.backends.backend_protocol import Output
from plait.dialogue import Answer, Question
from plait.json_form import JsonValue, value
from plait.usage import NO_USAGE, Usage


@value
class Call:
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
    denied: tuple[str, ...] = ()
    """Actions that the agent was not allowed to perform."""
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
        """Id of the last message held whole by the session, as needed by `Call.rewind_to`; None if there is none."""
        ...

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event of the output, and return the outputs in it."""
        ...

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the outcome of the turn, once the child has ended or `is_final` holds.

        Raises BackendError if the turn has failed. Whether the answer is whole is decided by `whole_turn`.
        """
        ...
