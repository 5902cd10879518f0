"""Planners with a script, policies with a script, and stores that keep what they were told."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from plait import Task
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.json_form import JsonValue
from plait.persistence import Batch, Store
from plait.workflows import Decision, RecordedRun
from tests.support.fakes import Answer, Talker
from tests.support.stores.faulty_store import FaultyStore


def spec(task_id: str, prompt: str = "", **more: JsonValue) -> dict[str, JsonValue]:
    """A task in the shape of a plan file."""
    return {"id": task_id, "prompt": prompt or task_id, **more}


def plan(*specs: Mapping[str, JsonValue] | object) -> str:
    """A planner's answer."""
    return json.dumps(list(specs))


def scripted(answers: Mapping[str, Any] | None = None) -> Answer:
    """Answers by the prompt's first word, one after the other where there is a list of them; an echo to all else."""
    left = {prompt: list(found) if isinstance(found, list) else found for prompt, found in (answers or {}).items()}

    def answer(prompt: str, _opening: ConversationRequest) -> str | Reply | Exception:
        found = left.get(prompt.partition(" ")[0])
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return f"<{prompt}>" if found is None else found

    return answer


def talker(answers: Mapping[str, Any] | None = None) -> Talker:
    return Talker(scripted(answers))


def listed(values: Sequence[JsonValue] | JsonValue) -> Reply:
    """An answer with data."""
    return Reply(json.dumps(values), values)  # type: ignore[arg-type]


class Recording(FaultyStore):
    """A store that keeps the batches it was given, and does what `inside` does."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        self.batches: list[Batch] = []

    async def write(self, batch: Batch) -> None:
        self.batches.append(batch)
        await super().write(batch)

    def kinds(self) -> list[list[str]]:
        """The names of the changes of each batch."""
        return [[type(change).__name__ for change in batch.events] for batch in self.batches]

    def batch_of(self, kind: str) -> list[str]:
        """The names in the only batch that holds such a change."""
        (found,) = [kinds for kinds in self.kinds() if kind in kinds]
        return found


Rule = Callable[[RecordedRun], Decision | None]


class Scripted:
    """A policy that does what `rule` says; None goes on with the state as it is. `asked` is what it was asked about."""

    kind = "scripted"

    def __init__(self, rule: Rule = lambda _: None) -> None:
        self.rule = rule
        self.asked: list[str | None] = []

    def settings(self) -> Mapping[str, JsonValue]:
        return {"made": "by a test"}

    def backends(self) -> Collection[str | None]:
        return ()

    def decide(self, run: RecordedRun) -> Decision:
        self.asked.append(run.ended)
        return self.rule(run) or Decision(state=run.state)


def by_end(decisions: Mapping[str | None, Decision]) -> Rule:
    """Each decision when its task has ended."""
    return lambda run: decisions.get(run.ended)


def tasks(*ids: str, **more: Any) -> tuple[Task, ...]:
    return tuple(Task(task_id, task_id, **more) for task_id in ids)
