"""Questions asked by tasks and the answers to questions: validation and stored form. Pure."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any, TypeAlias

from plait.backends.output_schema import Mismatch, Schema
from plait.clock_and_ids import parse_time
from plait.dialogue import Question
from plait.errors import BackendError, PlaitError
from plait.json_form import JsonInput, JsonValue, value
from plait.safe_text import clean_text, is_json, parse_json, shorten


class Way(StrEnum):
    """The way in which a task asked a question, which determines how the task continues."""

    REPLY = "reply"
    """The conversation ended with the question: the answer is the next message of the conversation."""
    CALL = "call"
    """The code of the task called `ask`: the task runs again from its start, and the call returns the answer."""
    BUDGET = "budget"
    """The next call does not fit into the budget of the run: the answer is a higher budget, and the task goes on."""
    MAX_COST = "max_cost"
    """The next call does not fit into the `max_cost` of the task: the answer is a higher one."""
    CREDIT = "credit"
    """The account of the backend has no credit left: the answer says that there is some, and the task goes on."""


RAISES = frozenset({Way.BUDGET, Way.MAX_COST})
"""The ways whose answer is a sum of money, which the task itself never reads."""


_LONGEST = 60  # characters of a question in a message
GO_ON = "go on"
"""The answer to a question of the way CREDIT."""
GO_ON_SCHEMA: Mapping[str, object] = {"enum": [GO_ON]}


def credit_question(backend: str, error: str) -> str:
    """Return the question about a backend whose account has no credit left, as the server says in `error`."""
    return f"backend {backend!r} has no credit left ({error[:300]}): top up the account, then answer {GO_ON!r}"


@value
class Asking:
    """An open question of a task."""

    question: Question
    way: Way
    deadline_at: str | None = None
    """The deadline, UTC in ISO 8601; None without a deadline."""

    def encoded(self) -> str:
        """Return the JSON text stored in `TaskWaiting.asked`. Raises TypeError or ValueError for values outside
        JSON.
        """
        question = self.question
        form: dict[str, Any] = {"way": self.way.value}
        if question.schema is not None:
            form["schema"] = dict(question.schema)
        if question.default is not None:
            form["default"] = question.default
        if self.deadline_at is not None:
            form["deadline"] = self.deadline_at
        return _json(form)

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed at Unix time `now`."""
        return self.deadline_at is not None and parse_time(self.deadline_at) <= now

    def checked(self, value: JsonInput) -> JsonValue:
        """Return `value` if it is a valid answer. Raises PlaitError with the reason otherwise."""
        if isinstance(value, str) and not self.question.schema:
            return clean_text(value)
        question_text = repr(shorten(self.question.text, _LONGEST))
        if self.question.schema is None:
            raise PlaitError(
                f"the answer to the question {question_text} must be text, not {shorten(repr(value), _LONGEST)}"
            )
        try:
            # Encode and parse the value here, to reject values that the store cannot hold.
            text = clean_text(_json(value))
            parse_json(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlaitError(f"the answer to the question {question_text} cannot be stored as JSON: {error}") from None
        try:
            return Schema(self.question.schema).read(text)
        except (Mismatch, BackendError) as error:
            raise PlaitError(f"the answer does not fit the question {question_text}: {error}") from None

    def read(self, text: str) -> JsonValue:
        """Return the answer typed as `text`: the text itself, or with a schema the parsed JSON.

        Text that does not fit the schema as JSON is tried as a JSON string. With an empty schema, only a text that is
        JSON as a whole is parsed. Raises PlaitError if neither fits.
        """
        if self.question.schema is None or (not self.question.schema and not is_json(text)):
            return clean_text(text)
        try:
            return Schema(self.question.schema).read(text)
        except (Mismatch, BackendError) as error:
            try:
                return self.checked(clean_text(text))
            except PlaitError as mismatch:
                # Report a type mismatch for `yes`, not invalid JSON.
                if len(text) <= _SHORT_ANSWER and not is_json(text):
                    raise mismatch from None
                question_text = shorten(self.question.text, _LONGEST)
                raise PlaitError(f"the answer does not fit the question {question_text!r}: {error}") from None


_SHORT_ANSWER = 40


def asking_of(text: str, encoded: str) -> Asking:
    """Return the stored question with the text `text`. Raises ValueError, KeyError or TypeError if `encoded` is
    damaged.
    """
    form = json.loads(encoded)
    question = Question(text, form.get("schema"), form.get("default"))
    return Asking(question, Way(form["way"]), form.get("deadline"))


@value
class OpenQuestion:
    """A question waiting for an answer."""

    run_id: str
    task_id: str
    attempt: int
    """The number of the attempt that ended with the question."""
    text: str
    """The question."""
    schema: Mapping[str, object] | None
    """The JSON Schema of the answer; None for a text. See `Question`."""
    default: JsonValue
    """The answer used after the deadline. See `Question`."""
    deadline_at: str | None
    """The deadline, UTC in ISO 8601; None without a deadline."""

    @classmethod
    def of(cls, run_id: str, task_id: str, attempt: int, asking: Asking) -> OpenQuestion:
        """Return the question that ended attempt number `attempt` of the task."""
        question = asking.question
        return cls(
            run_id,
            task_id,
            attempt=attempt,
            text=question.text,
            schema=question.schema,
            default=question.default,
            deadline_at=asking.deadline_at,
        )


@value
class AnsweredQuestion:
    """A stored answer."""

    attempt: int
    """The number of the attempt that ended with the question."""
    way: Way
    question: str
    value: JsonValue
    by: str
    """The source of the answer: `person`, `default` (no answer by the deadline) or `callback`."""

    @property
    def text(self) -> str:
        """The message sent in the conversation."""
        return self.value if isinstance(self.value, str) else _json(self.value)


def encode_answers(answers: Sequence[AnsweredQuestion]) -> str:
    """Return the JSON text stored in `TaskAnswered.answers`."""
    return _json([asdict(answer) for answer in answers])


def answers_of(encoded: str | None) -> tuple[AnsweredQuestion, ...]:
    """Return the stored answers. Raises ValueError, KeyError or TypeError if `encoded` is damaged."""
    if encoded is None:
        return ()
    return tuple(replace(AnsweredQuestion(**answer), way=Way(answer["way"])) for answer in json.loads(encoded))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


OnQuestion: TypeAlias = Callable[[OpenQuestion], Awaitable[JsonInput]]
"""Callback that answers a question in the process executing the run; None defers to other ways of answering."""
