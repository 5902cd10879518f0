"""A task that waits for a person: how it is found, and what is said of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from plait.backends.protocol import JsonValue
from plait.persistence.protocol import Store
from plait.runner.cli.backends import Backing
from plait.runner.cli.display.text import age, one_line
from plait.runner.cli.options import plait
from plait.runner.domain.question import OpenQuestion, unix
from plait.runner.domain.status import TaskStatus

_LONGEST_VALUE = 120


@dataclass(frozen=True, slots=True)
class Waiting:
    """A task that waits for a person. `question` is what it asks itself, None for one marked at_most_once that was cut;
    `text` is what is asked in either case.
    """

    run_id: str
    task_id: str
    attempt: int
    text: str
    question: OpenQuestion | None

    def command(self, path: Path) -> str:
        """The command that answers, to be completed."""
        if self.question is None:
            return plait(path, "answer", self.run_id, self.task_id, "--done", "TEXT")
        return plait(path, "answer", self.run_id, self.task_id, "TEXT" if self.question.schema is None else "JSON")

    def terms(self) -> Iterator[tuple[str, str]]:
        """What else there is to know before answering, each with its name."""
        question = self.question
        if question is None:
            return
        if question.schema is not None:
            yield "wants", one_line(shape_of(cast("Mapping[str, JsonValue]", question.schema)), _LONGEST_VALUE)
        if question.default is not None:
            yield "default", one_line(_json(question.default), _LONGEST_VALUE)
        if question.deadline_at is not None:
            yield "deadline", _deadline(question, question.deadline_at)


async def waiting_in(store: Store, run_id: str) -> list[Waiting]:
    """What waits in the run, in the order of its tasks, without questions that are answered and not yet taken up.
    Raises StoreError, RunNotFound.
    """
    asked = {one.task_id: one for one in await Backing({}).runner({}, store=store).questions(run_id)}
    return [
        Waiting(run_id, task.task_id, task.attempt, task.question or "", asked.get(task.task_id))
        for task in await store.list_tasks(run_id)
        if TaskStatus(task.status) is TaskStatus.WAITING_INPUT and (task.asked is None or task.task_id in asked)
    ]


def _deadline(question: OpenQuestion, at: str) -> str:
    left = unix(at) - time.time()
    if left > 0:
        return f"{at}, in {age(left)}"
    return f"{at}, over: `plait resume` " + ("fails the task" if question.default is None else "takes the default")


def shape_of(schema: Mapping[str, JsonValue]) -> str:
    """What a JSON Schema wants, in a few words."""
    allowed, kind, fields = schema.get("enum"), schema.get("type"), schema.get("properties")
    if isinstance(allowed, list) and allowed:
        return "one of " + ", ".join(map(_json, allowed))
    if kind == "object" and isinstance(fields, dict) and fields:
        return f"an object with {', '.join(fields)}"
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        return f"a list, each {shape_of(items)}"
    if isinstance(kind, str) and schema.keys() <= {"type", "title", "description"}:
        return kind
    return "JSON that fits " + _json(dict(schema)) if schema else "any JSON"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
