"""A run that grows, ended at every moment and resumed: nothing is added twice, no planner is asked again."""

from __future__ import annotations

from collections import Counter

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.errors import BackendError, Conflict, ErrorKind
from plait.events import TasksAdded
from plait.persistence import MemoryStore, Store
from plait.runner.engine import checkpointer
from plait.workflows import Decision, RecordedRun
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Recording, Scripted, listed, plan, spec, talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

ANSWERS = {
    "plan": plan(
        spec("sub", output="tasks", depends_on=["plan"]), spec("list"), spec("each", "e{{ item }}", for_each="list")
    ),
    "sub": Reply("said", tasks=(spec("late", "late {{ each }}", depends_on=["each"]),), data=[]),
    "list": listed([1, 2]),
}
WHOLE = DAG([Task("plan", prompt="plan", adds_tasks=True), Task("end", "end {{ plan }}", ["plan"])])
ALL = {"plan", "end", "sub", "list", "each", "late", "each.1", "each.2", "reviewed"}


def reviews() -> Scripted:
    """A policy that adds one task when `late` has ended, and counts what it was asked about in its state."""

    def rule(run: RecordedRun) -> Decision:
        seen = [*(run.state or []), run.ended]  # type: ignore[misc]
        return Decision(add=(Task("reviewed", "reviewed"),) if run.ended == "late" else (), state=seen)

    return Scripted(rule)


async def _until_dead(store: Store, writes: int, backend: Talker) -> str | None:
    """Run until the store has taken so many writes, as if the process died then. None when it took no more."""
    dying = FaultyStore(store, on_write(lambda number: Fault.BEFORE if number > writes else None))
    runner = ParallelRunner(backend, store=dying, clock=QuickClock(), strict=True)
    try:
        async with runner.start(WHOLE, "r", policy=reviews()) as run:
            await run.result()
    except Exception:
        return "r"
    return None


@pytest.mark.parametrize("writes", range(1, 12))
async def test_a_death_after_any_write(writes: int) -> None:
    store = MemoryStore()
    backend = talker(ANSWERS)
    await _until_dead(store, writes, backend)
    done = {task.task_id for task in await store.list_tasks("r") if task.status == "completed"}
    again, policy = talker(ANSWERS), reviews()
    result = await ParallelRunner(again, store=store, clock=QuickClock()).resume("r", policy=policy)
    assert result.status is RunStatus.COMPLETED
    assert set(result.tasks) == ALL
    assert not done & {request.idempotency_key.partition(":")[2] for request in again.requests}
    events = await store.list_events("r")
    added = Counter(event.task_id for event in events if event.kind == "tasks_added")
    assert added == {"plan": 1, "sub": 1, "each": 1, None: 1}
    record = await store.get_run("r")
    assert record is not None
    ended = [e.task_id for e in events if e.kind == "task_completed"]
    decided = [e for e in events if e.kind == "policy_decided"]
    assert len(decided) == len(ended) + 1
    assert record.policy_seq == decided[-1].seq
    assert record.policy_state == _state([*ended, None])


def _state(seen: list[str | None]) -> str:
    from plait.json_form import to_json

    return to_json({"state": seen, "idle": True})


async def test_an_empty_list_is_unfolded_again_and_once(store: Store) -> None:
    """Nothing tells that it was unfolded but the list itself."""
    dag = DAG([Task("list", "list"), Task("m", "m", for_each="list"), Task("end", "end {{ m }}", ["m"])])
    backend = talker({"list": listed([]), "end": ValueError("no")})
    first = await ParallelRunner(backend, store=store).run(dag)
    result = await ParallelRunner(talker(), store=store).resume(first.run_id, retry_failed=True)
    assert (result.status, result["m"].data, result["m"].reused) == (RunStatus.COMPLETED, [], True)


@pytest.mark.parametrize("limit", [40, 41, 42])
async def test_what_belongs_together_is_written_together_after_a_long_outage(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up goes in steps of so many changes, and none of them ends between a completion and what it brought."""
    monkeypatch.setattr(checkpointer, "BATCH_LIMIT", limit)
    width = 20
    store = Recording(MemoryStore())
    calls = 0
    tasks_in_all = 2 * width + 5

    def during_the_outage(number: int) -> Fault | None:
        return Fault.BEFORE if number > 1 and calls < tasks_in_all else None

    failing = FaultyStore(store, on_write(during_the_outage))

    async def work(prompt: str) -> object:
        nonlocal calls
        calls += 1
        return [spec(f"a{prompt[1:]}")] if prompt.startswith("p") else "x"

    # A planner makes three changes: so one of three limits in a row lies right behind a planner's completion.
    first = [Task(f"t{n}", f"t{n}") for n in range(4)]
    tasks = [*first, *(Task(f"p{n}", f"p{n}", adds_tasks=True) for n in range(width))]
    dag = DAG([*tasks, Task("last", "last", [task.id for task in tasks])])
    result = await ParallelRunner(work, store=failing, concurrency=1).run(dag, "r")
    assert (result.status, len(result.tasks)) == (RunStatus.COMPLETED, tasks_in_all)
    assert max(len(kinds) for kinds in store.kinds()) >= limit
    for batch in store.batches:
        assert not isinstance(batch.events[0], TasksAdded)
    assert not result.degraded[0].lost


async def test_tasks_that_the_store_refuses_take_their_completion_with_them() -> None:
    """Else the planner would count as done, and what it planned would be gone."""

    class Refusing(Recording):
        async def write(self, batch) -> None:  # type: ignore[no-untyped-def]
            if any(isinstance(change, TasksAdded) for change in batch.events):
                raise Conflict("no")
            await super().write(batch)

    inner = MemoryStore()
    backend = talker({"plan": plan(spec("a"))})
    result = await ParallelRunner(backend, store=Refusing(inner)).run(DAG([Task("plan", "plan", adds_tasks=True)]), "r")
    assert (result.status, result.failed) == (RunStatus.FAILED, ("plan",))
    assert [(task.task_id, task.status) for task in await inner.list_tasks("r")] == [("plan", "failed")]


async def test_a_correction_is_not_sent_about_results_that_are_made_anew(store: Store) -> None:
    """The planner's mistakes were about a plan for the old result of `a`."""
    dag = DAG(
        [Task("a", "a", failure_mode="soft"), Task("plan", "plan with [{{ a }}]", depends_on=["a"], adds_tasks=True)]
    )
    told = "These tasks cannot be added"
    first = talker({"a": BackendError(ErrorKind.REFUSED, "no"), "plan": plan(spec("plan"))})
    dying = Dying(lambda prompt: prompt.startswith(told), lambda _: True, first)
    await die(store, dying, dag)
    assert [prompt.split()[0] for prompt in dying.hanging] == ["These"]
    again = talker({"a": "new", "plan": plan(spec("b"))})
    result = await ParallelRunner(again, store=store).resume("r", retry_failed=True)
    assert (result.status, again.prompts) == (RunStatus.COMPLETED, ["a", "plan with [new]", "b"])


async def test_a_planner_that_asks_a_person_first(store: Store) -> None:
    from plait.dialogue import Question

    def answer(prompt: str, request: ConversationRequest) -> str | Reply:
        if prompt != "plan":
            return plan(spec("a")) if request.answer is not None else f"<{prompt}>"
        return Reply("?", question=Question("how many?"))

    first = await ParallelRunner(Talker(answer), store=store).run(DAG([Task("plan", "plan", adds_tasks=True)]))
    assert (first.status, list(first.tasks)) == (RunStatus.WAITING_INPUT, ["plan"])
    result = await ParallelRunner(Talker(answer), store=store).resume(first.run_id, answers={"plan": "one"})
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["plan", "a"])
