"""What a task's conversation goes on from: another task's, or what an earlier attempt of its own began."""

from __future__ import annotations

from dataclasses import dataclass

from backends.protocol import Message
from backends.values import value
from runner.questions import Answered

NOT_ADDED = "the tasks of its answer cannot be added"
"""How the error begins of an attempt whose reply brought tasks that are wrong."""


@value
class Past:
    """A conversation so far, everything that it continues included."""

    session_id: str | None = None
    messages: tuple[Message, ...] = ()


NO_PAST = Past()


@dataclass(frozen=True, slots=True)
class GoingOn:
    """How the next attempt of a task takes up a conversation that has begun: `said` is what earlier attempts of the
    task said in it, and are stored with. It says the `answer` to the question that stopped it, or what was `wrong` with
    the last reply. `interrupted`: the turn had begun already, and was cut.
    """

    session_id: str | None
    said: tuple[Message, ...] = ()
    answer: Answered | None = None
    wrong: str | None = None
    interrupted: bool = False
