"""Planners whose correction a crash got in the way of: they are told once what was wrong, and in the same talk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from persistence import Batch, Store, TaskStarted
from runner import DAG, Action, ParallelRunner, RunStatus, Task
from tests.support.fakes import QuickClock, Talker
from tests.support.faulty_store import Fault, FaultyStore, on_write
from tests.support.growth import plan, spec, talker

DAG_OF_ONE = DAG([Task("plan", "plan", adds_tasks=True)])


class Cut(FaultyStore):
    """Nothing is stored any more from the start of the second attempt on, which itself is where it was `begun`."""

    begun = False

    async def write(self, batch: Batch) -> None:
        starts = [n for n, one in enumerate(batch.changes) if isinstance(one, TaskStarted) and one.attempt == 2]
        if starts and not self.begun:
            batch = replace(batch, changes=batch.changes[: starts[0]])
        await super().write(batch)
        if starts:
            self.faults = on_write(lambda _: Fault.BEFORE)


async def cut(store: Store, *, begun: bool) -> None:
    """A run whose process died when its planner was about to be told of its mistakes, or had just `begun` to be."""
    dying = Cut(store)
    dying.begun = begun
    backend = talker({"plan": "no plan", "These": "[]"})
    await ParallelRunner(backend, store=dying, clock=QuickClock()).run(DAG_OF_ONE, "r")


def resuming(store: Store, backend: Talker) -> ParallelRunner:
    return ParallelRunner(backend, store=store, clock=QuickClock())


@pytest.mark.parametrize("begun", [False, True])
async def test_a_crash_costs_a_planner_neither_its_correction_nor_its_talk(store: Store, begun: bool) -> None:
    await cut(store, begun=begun)
    (task,) = await store.list_tasks("r")
    assert (task.status, task.attempt) == (("running", 2) if begun else ("pending", 1))
    backend = talker({"plan": "no plan", "These": plan(spec("a"))})
    runner = resuming(store, backend)
    verdict = (await runner.preview_resume("r")).tasks["plan"]
    if not begun:
        told = "attempt 1 failed (invalid_output); it is told what was wrong"
        assert (verdict.action, verdict.reason, verdict.repeats) == (Action.CONTINUE, told, False)
    result = await runner.resume("r")
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["plan", "a"])
    assert [prompt.partition(" ")[0] for prompt in backend.prompts] == ["These", "a"]
    first = backend.openings[0]
    assert (first.resume, [message.content for message in first.history]) == (True, ["plan", "no plan"])
    said: list[Any] = [one for one in await store.list_messages("r", "plan") if one.attempt == result["plan"].attempts]
    assert [one.content for one in said] == ["plan", "no plan", backend.prompts[0], result.text["plan"]]


@pytest.mark.parametrize("begun", [False, True])
async def test_nor_does_it_give_it_a_second_one(store: Store, begun: bool) -> None:
    await cut(store, begun=begun)
    backend = talker({"These": "none either"})
    result = await resuming(store, backend).resume("r")
    assert (result["plan"].error_kind, len(backend.prompts)) == ("invalid_output", 1)
