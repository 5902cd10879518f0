"""Questions that tasks ask, and the answers they get: how they are checked, and how they read in the store. Pure."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeAlias

from plait.backends.errors import BackendError
from plait.backends.protocol import JsonInput, JsonValue, Question
from plait.backends.structured import Mismatch, Schema
from plait.backends.text import clean_text, parse_json
from plait.runner.errors import PlaitError


class Way(StrEnum):
    """How a task asked, which decides how it goes on."""

    REPLY = "reply"
    """Its conversation ended with the question: the answer is the next thing said in it."""
    CALL = "call"
    """Its code called `ask`: it is run again from its start, and the call returns the answer."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A question that waits: `deadline_at` is a time as the store writes it, or None."""

    question: Question
    way: Way
    deadline_at: str | None = None

    def encoded(self) -> str:
        """As `TaskWaiting.asked`. Raises TypeError or ValueError for what JSON does not have."""
        asked = self.question
        kept: dict[str, Any] = {"way": self.way.value}
        if asked.schema is not None:
            kept["schema"] = dict(asked.schema)
        if asked.default is not None:
            kept["default"] = asked.default
        if self.deadline_at is not None:
            kept["deadline"] = self.deadline_at
        return _json(kept)

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed at Unix time `now`."""
        return self.deadline_at is not None and unix(self.deadline_at) <= now

    def checked(self, value: JsonInput) -> JsonValue:
        """`value`, if the question can be answered with it. Raises PlaitError saying why not."""
        if self.question.schema is None:
            if not isinstance(value, str):
                raise PlaitError(f"the question {_short(self.question.text)!r} wants a text, not {_short(repr(value))}")
            return clean_text(value)
        try:
            # As JSON reads it back: a value that the store cannot hold must not get as far as there.
            plain = parse_json(clean_text(_json(value)))
        except (TypeError, ValueError, RecursionError) as error:
            asked = _short(self.question.text)
            raise PlaitError(f"the answer to the question {asked!r} is nothing that JSON can hold: {error}") from None
        try:
            return Schema(self.question.schema).check(plain)
        except (Mismatch, BackendError) as error:
            raise PlaitError(f"the answer does not fit the question {_short(self.question.text)!r}: {error}") from None

    def read(self, text: str) -> JsonValue:
        """The value that `text`, as a person typed it, stands for: itself, or with a schema its JSON, and where that
        does not fit, the text as a JSON string. Raises PlaitError.
        """
        if self.question.schema is None:
            return clean_text(text)
        try:
            return Schema(self.question.schema).read(text)
        except (Mismatch, BackendError) as error:
            try:
                return self.checked(clean_text(text))
            except PlaitError as mismatch:
                if len(text) <= _SHORT_ANSWER and not _is_json(
                    text
                ):  # "yes" is told that it is no boolean, not no JSON
                    raise mismatch from None
                asked = _short(self.question.text)
                raise PlaitError(f"the answer does not fit the question {asked!r}: {error}") from None


_SHORT_ANSWER = 40


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def asking_of(text: str, encoded: str) -> Asking:
    """What `encoded` holds of the question `text`. Raises ValueError, KeyError or TypeError where it is damaged."""
    kept = json.loads(encoded)
    question = Question(text, kept.get("schema"), kept.get("default"))
    return Asking(question, Way(kept["way"]), kept.get("deadline"))


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question that waits for its answer: which attempt of which task ended with it, and what was asked. `schema`,
    `default` as in `Question`; `deadline_at` is UTC in ISO 8601, None for no deadline.
    """

    run_id: str
    task_id: str
    attempt: int
    text: str
    schema: Mapping[str, object] | None
    default: JsonValue
    deadline_at: str | None

    @classmethod
    def of(cls, run_id: str, task_id: str, attempt: int, asking: Asking) -> OpenQuestion:
        """The question with which `attempt` of the task ended."""
        asked = asking.question
        return cls(run_id, task_id, attempt, asked.text, asked.schema, asked.default, asking.deadline_at)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer as it is kept: to the question that ended `attempt`. `by` says who gave it: `person`, `default`
    (nobody had by the deadline) or `callback`.
    """

    attempt: int
    way: Way
    question: str
    value: JsonValue
    by: str

    @property
    def text(self) -> str:
        """What is said in the conversation."""
        return self.value if isinstance(self.value, str) else _json(self.value)


def encode_answers(answers: Sequence[Answered]) -> str:
    """As `TaskAnswered.answers`."""
    return _json(
        [
            {"attempt": a.attempt, "way": a.way.value, "question": a.question, "value": a.value, "by": a.by}
            for a in answers
        ]
    )


def answers_of(encoded: str | None) -> tuple[Answered, ...]:
    """What is stored. Raises ValueError, KeyError or TypeError where it is damaged."""
    if encoded is None:
        return ()
    return tuple(replace(Answered(**one), way=Way(one["way"])) for one in json.loads(encoded))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


OnQuestion: TypeAlias = Callable[[OpenQuestion], Awaitable[JsonInput]]
"""Answers a question in the process that runs the run; None leaves it to others."""


def unix(at: str) -> float:
    """The Unix time of a stored one."""
    return datetime.strptime(at, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC).timestamp()
