"""Planners whose correction a crash got in the way of: they are told once what was wrong, and in the same talk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait import DAG, OpenQuestion, ParallelRunner, Retry, RunStatus, Task
from plait.backends.backend_protocol import Reply
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.events import TaskStarted
from plait.persistence import Batch, Store
from plait.results import ResumeAction
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import plan, spec, talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

DAG_OF_ONE = DAG([Task("plan", "plan", adds_tasks=True)])


class Cut(FaultyStore):
    """Nothing is stored any more from the start of the attempt on, which itself is where it was `begun`."""

    attempt = 2
    begun = False

    async def write(self, batch: Batch) -> None:
        number = self.attempt
        starts = [n for n, one in enumerate(batch.events) if isinstance(one, TaskStarted) and one.attempt == number]
        if starts and not self.begun:
            batch = replace(batch, events=batch.events[: starts[0]])
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
    verdict = (await runner.runs.preview("r")).tasks["plan"]
    if not begun:
        told = "attempt 1 failed (invalid_output); the mistakes are sent to the agent"
        assert (verdict.action, verdict.reason, verdict.possibly_billed_twice) == (ResumeAction.CONTINUE, told, False)
    result = await runner.resume("r")
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["plan", "a"])
    assert [prompt.partition(" ")[0] for prompt in backend.prompts] == ["These", "a"]
    first = backend.requests[0]
    assert (first.resume, [message.content for message in first.history]) == (True, ["plan", "no plan"])
    said: list[Any] = [one for one in await store.list_messages("r", "plan") if one.attempt == result["plan"].attempts]
    assert [one.content for one in said] == ["plan", "no plan", backend.prompts[0], result.text["plan"]]


@pytest.mark.parametrize("begun", [False, True])
async def test_nor_does_one_after_a_failure_that_passed(store: Store, begun: bool) -> None:
    dying = Cut(store)
    dying.begun, dying.attempt = begun, 3
    backend = talker({"plan": "no plan", "These": [BackendError(ErrorKind.OVERLOADED, "busy"), "[]"]})
    dag = DAG([Task("plan", "plan", adds_tasks=True, retry=Retry(attempts=4))])
    await ParallelRunner(backend, store=dying, clock=QuickClock()).run(dag, "r")
    (task,) = await store.list_tasks("r")
    assert (task.status, task.attempt) == (("running", 3) if begun else ("pending", 2))
    backend = talker({"These": "[]"})
    result = await resuming(store, backend).resume("r")
    assert (result.status, [prompt.partition(" ")[0] for prompt in backend.prompts]) == (RunStatus.COMPLETED, ["These"])
    assert [message.content for message in backend.requests[0].history] == ["plan", "no plan"]


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_that_a_told_planner_asked_for_is_said_and_not_the_correction_again(
    store: Store, begun: bool
) -> None:
    async def red(_question: OpenQuestion) -> str:
        return "red"

    dying = Cut(store)
    dying.begun, dying.attempt = begun, 4
    asks = Reply("which?", question=Question("which?"))
    backend = talker({"plan": "no plan", "These": asks, "red": [BackendError(ErrorKind.OVERLOADED, "busy"), "[]"]})
    dag = DAG([Task("plan", "plan", adds_tasks=True, retry=Retry(attempts=4))])
    await ParallelRunner(backend, store=dying, clock=QuickClock(), on_question=red).run(dag, "r")
    backend = talker({"red": "[]"})
    result = await resuming(store, backend).resume("r")
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["red"])
    history = [message.content.partition(" ")[0] for message in backend.requests[0].history]
    assert history == ["plan", "no", "These", "which?"]


@pytest.mark.parametrize("begun", [False, True])
async def test_nor_does_it_give_it_a_second_one(store: Store, begun: bool) -> None:
    await cut(store, begun=begun)
    backend = talker({"These": "none either"})
    result = await resuming(store, backend).resume("r")
    assert (result["plan"].error_kind, len(backend.prompts)) == ("invalid_output", 1)
