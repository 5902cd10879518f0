"""What a task's conversation goes on from: another task's, or what an earlier attempt of its own began."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from plait.backends.protocol import Message
from plait.backends.text import clean_text
from plait.backends.values import value
from plait.runner.domain.question import Answered
from plait.runner.errors import DAGError

NOT_ADDED = "the tasks of its answer cannot be added"
"""How the error begins of an attempt whose reply brought tasks that are wrong."""


@value
class Past:
    """A conversation so far: what was `said` since `before`, where it continues one that is kept as well. In a long
    chain each holds its own part alone.
    """

    session_id: str | None = None
    said: tuple[Message, ...] = ()
    before: Past | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of it, oldest first."""
        parts, before = [self.said], self.before
        while before is not None:
            parts.append(before.said)
            before = before.before
        return tuple(chain.from_iterable(reversed(parts)))


NO_PAST = Past()


@dataclass(frozen=True, slots=True)
class GoingOn:
    """How the next attempt of a task takes up a conversation that has begun: `said` is what earlier attempts of the
    task said in it, and are stored with. It says the `answer` to the question that stopped it, or what was `wrong` with
    the last reply; `refused` is the turn that this ended, whose attempt failed: what comes of the task is stored with
    it. `interrupted`: the turn had begun already, and was cut.
    """

    session_id: str | None
    said: tuple[Message, ...] = ()
    answer: Answered | None = None
    wrong: str | None = None
    interrupted: bool = False
    refused: tuple[Message, ...] = ()

    @property
    def says(self) -> bool:
        """Whether the next attempt has something else to say than the task's prompt, until that is taken."""
        return self.answer is not None or self.wrong is not None


def not_added(error: DAGError) -> str:
    """The error of an attempt whose reply brought tasks that are wrong."""
    listed = "".join(f"\n- {problem}" for problem in error.problems[:20])
    return clean_text(f"{NOT_ADDED}:{listed}")[:2000]


def mistakes_prompt(failure: str) -> str:
    """What a planner is told whose attempt failed so: made from the error alone, which is stored, and so made again."""
    listed = failure.removeprefix(f"{NOT_ADDED}:")
    return f"These tasks cannot be added:{listed}\nAnswer again with all of the tasks, corrected."
