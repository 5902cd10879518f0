"""Starting points of a task's conversation: the conversation of another task, or of the task's earlier attempts."""

from __future__ import annotations

from itertools import chain

from plait.dialogue import Message
from plait.errors import DAGError
from plait.json_form import value
from plait.runner.domain.asked_question import AnsweredQuestion
from plait.safe_text import clean_text

INVALID_TASKS = "the tasks in the answer cannot be added"
"""First words of the error of an attempt whose reply contained invalid tasks."""
EVIDENCE = "check: "
"""First words of the message that says what the check of an answer found. Never sent to a model."""
FAILED_CHECK = "the check of the answer failed"
"""First words of the error of an attempt whose answer did not pass the check of the task."""


@value
class History:
    """A conversation up to now, as a linked list: in a long chain of continued tasks each link holds only its own
    messages.
    """

    session_id: str | None = None
    """The backend's id of the conversation, if known."""
    own_messages: tuple[Message, ...] = ()
    """The messages after `before`, oldest first."""
    before: History | None = None
    """The earlier part of the conversation; None at the start."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, oldest first."""
        parts, before = [self.own_messages], self.before
        while before is not None:
            parts.append(before.own_messages)
            before = before.before
        return tuple(chain.from_iterable(reversed(parts)))


NO_HISTORY = History()


@value
class Continuation:
    """Instructions for the next attempt of a task to continue a conversation already begun."""

    session_id: str | None
    """The backend's id of the conversation, if known."""
    messages: tuple[Message, ...] = ()
    """The messages of earlier attempts, to be stored with the next result."""
    answer: AnsweredQuestion | None = None
    """The answer to the question that ended the previous attempt."""
    correction: str | None = None
    """The description of the mistakes in the previous reply."""
    interrupted: bool = False
    """True if the turn had already begun and was cut off."""
    refused: tuple[Message, ...] = ()
    """The messages of the turns with refused answers, to be stored together with the outcome of the task."""

    @property
    def sends_message(self) -> bool:
        """True if the next attempt sends an answer or a correction first, in place of the task's prompt."""
        return self.answer is not None or self.correction is not None


def invalid_tasks_error(error: DAGError) -> str:
    """Return the error text of an attempt whose reply contained invalid tasks."""
    listed = "".join(f"\n- {problem}" for problem in error.problems[:20])
    return clean_text(f"{INVALID_TASKS}:{listed}")[:2000]


def is_refusal(error: str | None) -> bool:
    """Return whether an attempt with this error had an answer that was refused, to be corrected in the conversation."""
    return (error or "").startswith((INVALID_TASKS, FAILED_CHECK))


def correction_prompt(failure: str) -> str:
    """Return the prompt for a corrected answer, sent after the refusal `failure` of the last one.

    The prompt depends on the stored error alone, so a resumed run sends the same text.
    """
    if failure.startswith(FAILED_CHECK):
        return f"{failure[0].upper()}{failure[1:]}\n\nFix the cause, and then give your whole answer again."
    listed = failure.removeprefix(f"{INVALID_TASKS}:")
    return f"These tasks cannot be added:{listed}\nAnswer again with all of the tasks, corrected."
