"""Policies over stops, deaths and resumes: never asked twice about the same recorded event, and missed when missing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, PlaitError, Retry, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.errors import PolicyMissing, RunNotResumable
from plait.events import PolicyDecided, TaskCompleted
from plait.persistence import Batch, MemoryStore, Store
from plait.results import ResumeAction
from plait.workflows import Decision, RecordedRun
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Scripted, by_end, talker, tasks
from tests.support.quick_runs import quick_runs
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

WIDE = DAG([Task("a", "a"), Task("b", "b"), Task("c", "c", ["a", "b"]), Task("d", "d", ["c"])])


def counting(run: RecordedRun) -> Decision:
    """The state is what it was asked about."""
    seen = [*(run.state or []), run.ended]  # type: ignore[misc]
    return Decision(state=seen, add=tasks("extra", depends_on=["c"]) if run.ended == "c" else ())


async def test_a_stopped_run_goes_on_where_it_was(store: Store) -> None:
    policy = Scripted(counting)
    runs = []

    def answer(prompt: str, _opening: ConversationRequest) -> str:
        if prompt == "c":
            runs[0].stop()
        return f"<{prompt}>"

    async with ParallelRunner(Talker(answer), store=store).start(WIDE, "r", policy=policy) as run:
        runs.append(run)
        await run.result()
    again = Scripted(counting)
    result = await ParallelRunner(talker(), store=store).resume("r", policy=again)
    assert result.status is RunStatus.COMPLETED
    asked = policy.asked + again.asked
    assert sorted(map(str, asked)) == ["None", "a", "b", "c", "d", "extra"]
    record = await store.get_run("r")
    assert record is not None
    assert [event.kind for event in await store.list_events("r")].count("policy_decided") == len(asked)


@pytest.mark.parametrize("writes", range(1, 10))
async def test_after_a_death_it_is_asked_about_what_is_stored_and_was_not_asked_about(writes: int) -> None:
    store = MemoryStore()
    dying = FaultyStore(store, on_write(lambda number: Fault.BEFORE if number > writes else None))
    runner = ParallelRunner(talker(), store=dying, clock=QuickClock(), strict=True, concurrency=2)
    with suppress(Exception):
        await runner.run(WIDE, "r", policy=Scripted(counting))
    before = await store.get_run("r")
    assert before is not None
    policy = Scripted(counting)
    result = await ParallelRunner(talker(), store=store, clock=QuickClock()).resume("r", policy=policy)
    assert (result.status, set(result.tasks)) == (RunStatus.COMPLETED, {"a", "b", "c", "d", "extra"})
    record = await store.get_run("r")
    assert record is not None
    ended = [event.task_id for event in await store.list_events("r") if event.kind == "task_completed"]
    assert [event.kind for event in await store.list_events("r")].count("policy_decided") == len(ended) + 1
    assert (record.policy_state or "").count('"a"') == 1


async def test_a_run_whose_policy_has_rested_does_not_ask_it_again(store: Store) -> None:
    """It failed, so it can be resumed, but there is nothing new to be asked about."""
    backend = talker({"d": ValueError("no")})
    first = await ParallelRunner(backend, store=store).run(WIDE, policy=Scripted())
    policy = Scripted()
    result = await ParallelRunner(talker(), store=store).resume(first.run_id, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.FAILED, [])
    result = await ParallelRunner(talker(), store=store).resume(first.run_id, retry_failed=True, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.COMPLETED, ["d", None])


async def test_a_policy_that_failed_is_asked_again_when_failed_tasks_are(store: Store) -> None:
    def rule(run: RecordedRun) -> Decision:
        if run.ended == "b":
            raise RuntimeError("confused")
        return Decision(state=[*(run.state or []), run.ended])  # type: ignore[misc]

    runner = ParallelRunner(talker(), store=store, concurrency=1)
    first = await runner.run(WIDE, policy=Scripted(rule))
    assert (first.status, first["c"].status) == (RunStatus.FAILED, TaskStatus.PENDING)
    late = Decision(add=tasks("late"), state="better")
    policy = Scripted(lambda run: late if run.ended == "b" and run.state == ["a"] else None)
    result = await runner.resume(first.run_id, retry_failed=True, policy=policy)
    assert (result.status, result.text["late"]) == (RunStatus.COMPLETED, "<late>")
    assert policy.asked == ["b", "c", "d", "late", None], "it gave no sound answer about b"


async def test_without_its_policy_a_run_does_not_go_on(store: Store) -> None:
    first = await ParallelRunner(talker({"d": ValueError("no")}), store=store).run(WIDE, policy=Scripted())
    runner = ParallelRunner(talker(), store=store)
    with pytest.raises(PolicyMissing, match="'scripted'; pass the policy of the run"):
        await runner.resume(first.run_id, retry_failed=True)
    other = Scripted()
    other.kind = "other"
    with pytest.raises(PolicyMissing, match="was started with a policy of kind 'scripted', not 'other'"):
        await runner.resume(first.run_id, retry_failed=True, policy=other)
    record = await store.get_run(first.run_id)
    assert record is not None
    assert (record.status, record.owner) == ("failed", None)


async def test_a_service_begins_and_resumes_runs_with_a_policy(store: Store) -> None:
    def grows(run: RecordedRun) -> Decision | None:
        return Decision(add=tasks("late")) if run.ended == "b" else None

    failing = ParallelRunner(talker({"late": ValueError("no")}), store=store)
    async with quick_runs(failing) as runs:
        run_id = await runs.create(WIDE, policy=Scripted(grows))
        with pytest.raises(PolicyMissing, match="to `start` of its runs"):
            await runs.start(run_id)
        assert (await runs.get(run_id)).status is RunStatus.QUEUED
        await runs.start(run_id, policy=Scripted(grows))
        last = [event async for event in runs.events(run_id)][-1]
        assert last.kind == "run_failed"
    async with quick_runs(ParallelRunner(talker(), store=store)) as runs:
        with pytest.raises(PolicyMissing):
            await runs.start(run_id, retry_failed=True)
        await runs.start(run_id, retry_failed=True, policy=Scripted(grows))
        assert [event.kind async for event in runs.events(run_id, last.seq)][-1] == "run_completed"
        assert (await runs.get(run_id)).tasks["late"].text == "<late>"


async def test_a_run_begun_without_one_goes_on_without(store: Store) -> None:
    first = await ParallelRunner(talker({"d": ValueError("no")}), store=store).run(WIDE)
    with pytest.raises(PlaitError, match="was started without a policy"):
        await ParallelRunner(talker(), store=store).resume(first.run_id, retry_failed=True, policy=Scripted())


async def test_what_a_person_settles_is_an_end_too(store: Store) -> None:
    """Nobody ran the run when the task ended; its policy is asked when it goes on."""
    backend = Talker(lambda prompt, _: Reply("?", question=Question("how?")) if prompt == "c" else f"<{prompt}>")
    first = await ParallelRunner(backend, store=store).run(WIDE, policy=Scripted(counting))
    runner = ParallelRunner(talker(), store=store)
    await runner.runs.settle(first.run_id, "c", "done", "by hand")
    policy = Scripted(counting)
    result = await runner.resume(first.run_id, policy=policy)
    assert result.status is RunStatus.COMPLETED
    assert (policy.asked[0], policy.asked[-1]) == ("c", None)
    assert sorted(map(str, policy.asked)) == ["None", "c", "d", "extra"]


async def test_a_deadline_that_passed_while_nobody_was_there_is_an_end(store: Store) -> None:
    question = Question("how?", deadline=60.0)
    backend = Talker(lambda prompt, _: Reply("?", question=question) if prompt == "c" else f"<{prompt}>")
    first = await ParallelRunner(backend, store=store).run(WIDE, policy=Scripted())
    assert first.status is RunStatus.WAITING_INPUT
    policy = Scripted(by_end({"c": Decision(add=tasks("instead"))}))
    result = await ParallelRunner(talker(), store=store, clock=QuickClock()).resume(first.run_id, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.FAILED, ["c", "instead", None])


async def test_an_end_that_was_decided_is_kept_to(store: Store) -> None:
    """The process died between the decision and the run's end: nothing more runs, and nobody is asked."""
    dying = FaultyStore(store, on_write(lambda _: Fault.BEFORE if dead else None))
    dead = False

    class Mortal(FaultyStore):
        async def write(self, batch) -> None:  # type: ignore[no-untyped-def]
            nonlocal dead
            await super().write(batch)
            dead = dead or any(isinstance(one, TaskCompleted) and one.task_id == "c" for one in batch.events)

    mortal = Mortal(dying)
    policy = Scripted(by_end({"c": Decision(end=RunStatus.FAILED, error="enough")}))
    try:
        await ParallelRunner(talker(), store=mortal, clock=QuickClock()).run(WIDE, "r", policy=policy)
    finally:
        dead = False
    record = await store.get_run("r")
    assert record is not None
    assert record.status == "running"
    again, backend = Scripted(), talker()
    result = await ParallelRunner(backend, store=store, clock=QuickClock()).resume("r", policy=again)
    assert (result.status, result.error, again.asked, backend.prompts) == (RunStatus.FAILED, "enough", [], [])
    assert result["d"].status is TaskStatus.PENDING


async def test_an_answer_to_a_run_that_its_policy_failed_is_refused_unless_it_is_retried(store: Store) -> None:
    async def work(prompt: str) -> str:
        return f"got {await ask('Go?')}" if prompt == "q" else prompt

    def enough(run: RecordedRun) -> Decision | None:
        return Decision(end=RunStatus.FAILED, error="enough") if run.ended == "b" else None

    runner = ParallelRunner(work, store=store)
    first = await runner.run(DAG([Task("q", "q"), Task("b", "b")]), policy=Scripted(enough), run_id="r")
    before = await store.get_run("r")
    assert (first.status, first["q"].status) == (RunStatus.FAILED, TaskStatus.WAITING_INPUT)
    with pytest.raises(RunNotResumable, match=r"run r has failed \(enough\).* resume with retry_failed"):
        await runner.resume("r", answers={"q": "yes"}, policy=Scripted(enough))
    with pytest.raises(RunNotResumable, match=r"run r has failed \(enough\).* resume with retry_failed"):
        await runner.runs.answer("r", "q", "yes")
    assert await store.get_run("r") == before
    result = await runner.resume("r", answers={"q": "yes"}, policy=Scripted(enough), retry_failed=True)
    assert (result.status, result.text["q"]) == (RunStatus.COMPLETED, "got yes")


ENDING = DAG(
    [
        Task("asks", "asks"),
        Task("no", "no", retry=Retry(attempts=1)),
        Task("a", "a", weight=0.5),
        Task("slow", "slow"),
        Task("twice", "slow", at_most_once=True),
        Task("last", "last", ["slow"]),
    ]
)


class Cut(FaultyStore):
    """Nothing is stored any more once the policy has ended the run: its process died then."""

    async def write(self, batch: Batch) -> None:
        await super().write(batch)
        if any(isinstance(one, PolicyDecided) and '"end"' in one.state_json for one in batch.events):
            self.faults = on_write(lambda _: Fault.BEFORE)


BECOMES = {
    ResumeAction.CANCEL: TaskStatus.CANCELLED,
    ResumeAction.BLOCKED: TaskStatus.PENDING,
    ResumeAction.ASK: TaskStatus.WAITING_INPUT,
}


@pytest.mark.parametrize("retry_failed", [False, True])
@pytest.mark.parametrize(
    ("end", "left", "waits"),
    [
        (RunStatus.COMPLETED, ResumeAction.CANCEL, ResumeAction.CANCEL),
        (RunStatus.FAILED, ResumeAction.BLOCKED, ResumeAction.ASK),
    ],
)
async def test_a_preview_knows_of_an_end_that_was_decided(
    store: Store, end: Any, left: ResumeAction, waits: ResumeAction, retry_failed: bool
) -> None:
    async def work(prompt: str) -> str:
        if prompt == "slow":
            await anyio.sleep_forever()
        if prompt == "no":
            raise ValueError(prompt)
        if prompt == "a":
            await anyio.wait_all_tasks_blocked()
        return str(await ask("Go?")) if prompt == "asks" else prompt

    policy = Scripted(by_end({"a": Decision(end=end)}))
    await ParallelRunner(work, store=Cut(store), clock=QuickClock()).run(ENDING, "r", policy=policy)
    runner = ParallelRunner(work, store=store, clock=QuickClock())
    preview = await runner.runs.preview("r", retry_failed=retry_failed)
    result = await runner.resume("r", retry_failed=retry_failed, policy=Scripted())
    no = left if retry_failed else ResumeAction.KEEP
    wanted = {"asks": waits, "no": no, "a": ResumeAction.KEEP, "slow": left, "twice": waits, "last": left}
    assert {task_id: step.action for task_id, step in preview.tasks.items()} == wanted
    stays = {"no": TaskStatus.FAILED, "a": TaskStatus.COMPLETED}
    assert (result.status, preview.runs) == (end, 0)
    assert {task_id: result[task_id].status for task_id in wanted} == {
        task_id: stays[task_id] if action is ResumeAction.KEEP else BECOMES[action]
        for task_id, action in wanted.items()
    }
