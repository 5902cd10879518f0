"""What each change does to a run: the cases that the contract of stores, run with every store, has no line for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import Conflict
from plait.events import (
    AttemptEnd,
    LeaseRenewed,
    NewTask,
    NodeStarted,
    SessionOpened,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import Batch, MemoryStore, tables
from plait.persistence.apply_events import apply_events
from plait.statuses import TaskStatus
from plait.usage import NO_USAGE, Usage
from tests.contracts.store.samples import CREATED, DONE_A, OPENING, RUN, START_A, Writer, at, run_becomes, whole

ENDS: dict[str, AttemptEnd] = {
    "completed": DONE_A,
    "failed": TaskFailed(at(4), "a", 1, "auth", "no key"),
    "retried": TaskRetried(at(4), "a", 1, "overloaded", "later", delay_s=1.0),
    "interrupted": TaskInterrupted(at(4), "a", 1, "the owner died", crashed=True),
    "waiting": TaskWaiting(at(4), "a", 1, "Was it sent?"),
}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def writer(store: MemoryStore) -> Writer:
    writer = Writer(store)
    await writer.write(*OPENING)
    return writer


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("attempt", [0, 1, 3])
async def test_only_the_last_attempt_ends(store: MemoryStore, writer: Writer, end: str, attempt: int) -> None:
    await writer.write(START_A, ENDS["retried"], replace(START_A, attempt=2))
    before = await whole(store)
    with pytest.raises(Conflict, match=rf"of task 'a' \(attempt {attempt}\) does not follow: .* running, attempt 2"):
        await writer.write(replace(ENDS[end], attempt=attempt))
    assert await whole(store) == before
    await writer.write(replace(ENDS[end], attempt=2))


@pytest.mark.parametrize("cost", [None, 0.5])
@pytest.mark.parametrize("turn", ["First.", ()])
async def test_the_usage_of_several_ends_in_one_batch_is_added_up(
    store: MemoryStore, writer: Writer, cost: float | None, turn: str | tuple[()]
) -> None:
    usage = Usage(3, 2, cost)
    for task_id, number in (("a", 1), ("c", 2)):
        started = replace(START_A, task_id=task_id, attempt=1)
        failed = TaskRetried(at(4), task_id, 1, "overloaded", "later", usage=usage, delay_s=1.0)
        await writer.write(started, failed)
        run = await store.get_run(RUN)
        assert run is not None
        assert run.usage.input_tokens == 3 * number
    starts = [TaskStarted(at(5), task_id, 2, "fast") for task_id in "ac"]
    ends = [TaskCompleted(at(6), task_id, 2, "done", usage=usage, turn=turn) for task_id in "ac"]
    await writer.write(*starts, *ends)
    run = await store.get_run(RUN)
    assert run is not None
    assert run.usage == Usage(12, 8, None if cost is None else 2.0)


@pytest.mark.parametrize("further", [0.0, 1.0])
async def test_a_decision_adds_its_time_to_that_of_the_question(
    store: MemoryStore, writer: Writer, further: float
) -> None:
    asked = TaskWaiting(at(4), "a", 1, "Which?", asked="{}", duration_s=2.5)
    await writer.write(START_A, asked)
    await writer.write(replace(ENDS["failed"], at=at(5), duration_s=further))
    [attempt] = await store.list_attempts(RUN, "a")
    assert attempt.duration_s == 2.5 + further


async def test_the_time_of_the_question_is_read_by_another_owner(store: MemoryStore, writer: Writer) -> None:
    await writer.write(START_A, TaskWaiting(at(4), "a", 1, "Which?", asked="{}", duration_s=2.5))
    store._runs.clear()  # pyright: ignore[reportPrivateUsage]
    await writer.write(replace(ENDS["failed"], at=at(5), duration_s=1.0))
    [attempt] = await store.list_attempts(RUN, "a")
    assert attempt.duration_s == 3.5


async def test_crashes_are_counted_from_those_before(store: MemoryStore, writer: Writer) -> None:
    for attempt, end in enumerate((ENDS["interrupted"], ENDS["interrupted"], ENDS["waiting"]), 1):
        await writer.write(replace(START_A, attempt=attempt), replace(end, attempt=attempt))
    [task] = await store.list_tasks(RUN, "a")
    assert task.crashes == 2


async def test_an_attempt_without_usage_has_none(store: MemoryStore, writer: Writer) -> None:
    await writer.write(START_A, ENDS["failed"])
    [attempt] = await store.list_attempts(RUN, "a")
    assert attempt.usage is NO_USAGE


async def test_a_run_with_tasks_of_every_status_is_read(store: MemoryStore) -> None:
    tasks = tuple(NewTask(status.value, "p") for status in TaskStatus)
    await Writer(store).write(replace(CREATED, tasks=tasks), *OPENING[1:])
    store._connection.execute("UPDATE tasks SET status = task_id")
    run = await store.get_run(RUN)
    assert run is not None
    assert run.counts == {status.value: 1 for status in TaskStatus}


async def test_a_change_that_is_not_shown_has_no_event(store: MemoryStore, writer: Writer) -> None:
    before = await store.list_events(RUN)
    await writer.write(LeaseRenewed(at(5), 2000.0))
    assert await store.list_events(RUN) == before


@pytest.mark.parametrize("usage", [Usage(3, 2, model="sample-1"), Usage(3, 2, 0.5)])
async def test_a_model_or_a_cost_is_kept_without_a_session(store: MemoryStore, writer: Writer, usage: Usage) -> None:
    await writer.write(
        TaskStarted(at(3), "c", 1, "fast"), TaskCompleted(at(4), "c", 1, "done", usage=usage, turn="Last.")
    )
    [attempt] = await store.list_attempts(RUN, "c")
    assert attempt.usage == usage


async def test_an_attempt_without_a_session_has_not_that_of_the_attempt_before(
    store: MemoryStore, writer: Writer
) -> None:
    await writer.write(START_A, ENDS["retried"], TaskStarted(at(5), "a", 2, "fast"))
    assert [one.session_id for one in await store.list_attempts(RUN, "a")] == ["session-a", None]
    [task] = await store.list_tasks(RUN, "a")
    assert task.session_id is None


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_an_attempt_that_starts_and_ends_in_one_batch_is_one_write(end: str) -> None:
    opened = apply_events(RUN, None, 1, OPENING).run
    assert len(apply_events(RUN, opened, 4, [START_A, ENDS[end]]).segments) == 1
    again = replace(ENDS["retried"], task_id="c")
    several = TaskStarted(at(3), "c", 1, "fast"), again, TaskStarted(at(5), "c", 2, "fast"), replace(again, attempt=2)
    assert len(apply_events(RUN, opened, 6, several).segments) == 4


def test_a_question_and_its_end_in_one_batch_are_two_writes() -> None:
    opened = apply_events(RUN, None, 1, (*OPENING, START_A)).run
    assert len(apply_events(RUN, opened, 5, [ENDS["waiting"], ENDS["failed"]]).segments) == 2


async def test_a_task_keeps_who_added_it_and_its_backend_even_if_they_are_named_alike(
    store: MemoryStore, writer: Writer
) -> None:
    await writer.write(TasksAdded(at(5), (NewTask("d", "p", backend="a"),), "a"))
    [task] = await store.list_tasks(RUN, "d")
    assert (task.backend, task.added_by) == ("a", "a")


async def test_a_session_of_an_attempt_that_is_not_the_last_does_not_follow(writer: Writer) -> None:
    with pytest.raises(Conflict, match=r"task 'a' \(attempt 1\) does not follow: the task is pending, attempt 0"):
        await writer.write(SessionOpened(at(4), "a", 1, "session-a"))
    await writer.write(START_A)
    with pytest.raises(Conflict, match=r"task 'a' \(attempt 2\) does not follow: the task is running, attempt 1"):
        await writer.write(SessionOpened(at(4), "a", 2, "session-a"))


@pytest.mark.parametrize(
    "usage", [Usage(1), Usage(output_tokens=1), Usage(cost_usd=0.5), Usage(cost_usd=0.0), Usage(model="sample-1")]
)
async def test_a_token_a_cost_or_a_model_alone_is_kept(store: MemoryStore, writer: Writer, usage: Usage) -> None:
    await writer.write(START_A, replace(ENDS["failed"], usage=usage))
    [attempt] = await store.list_attempts(RUN, "a")
    assert attempt.usage == usage


async def test_a_change_of_the_run_stays_whatever_follows_in_its_batch(store: MemoryStore, writer: Writer) -> None:
    await writer.write(START_A, run_becomes(at(5), "failed", "no"), NodeStarted(at(5), "a", 1, "n"))
    run = await store.get_run(RUN)
    assert run is not None
    assert (run.status, run.error, run.ended_at) == ("failed", "no", at(5))


async def test_a_run_of_no_tasks_is_read_and_listed(store: MemoryStore) -> None:
    await Writer(store).write(replace(CREATED, tasks=()))
    run = await store.get_run(RUN)
    assert run is not None
    assert run.counts == {}
    assert await store.list_runs() == (replace(run, settings=""),)


def test_changes_of_tasks_alone_leave_the_head_but_for_its_number_and_sums() -> None:
    opened = apply_events(RUN, None, 1, OPENING).run
    before = opened.head
    applied = apply_events(RUN, opened, 4, [START_A])
    assert applied.head == (tables.SET_LAST_SEQ, (4, 0, 0, None, 0, 0, 0, 0, 0))
    assert (applied.run, applied.before, opened.head.last_seq) == (opened, before, 4)


LONG = "x" * 100_000
UNUSUAL = {
    "a large answer": replace(DONE_A, text=LONG, data_json=None),
    "a large prompt": replace(DONE_A, data_json=None, turn=LONG),
    "data": DONE_A,
    "a turn": replace(DONE_A, turn=()),
    "cached tokens": replace(DONE_A, data_json=None, usage=Usage(3, 2, cache_read_tokens=1)),
    "written tokens": replace(DONE_A, data_json=None, usage=Usage(3, 2, cache_write_tokens=1)),
    "reasoning": replace(DONE_A, data_json=None, usage=Usage(3, 2, reasoning_tokens=1)),
    "a partial cost": replace(DONE_A, data_json=None, usage=Usage(3, 2, 0.25, cost_is_partial=True)),
    "nothing unusual": replace(DONE_A, data_json=None),
}


@pytest.mark.parametrize("unusual", UNUSUAL)
async def test_a_completion_is_kept_whole(store: MemoryStore, writer: Writer, unusual: str) -> None:
    done = UNUSUAL[unusual]
    if unusual not in {"a large prompt", "a turn"}:
        done = replace(done, turn="First.")
    await writer.write(START_A, done)
    [task] = await store.list_tasks(RUN, "a")
    assert (task.status, task.text, task.data, task.usage) == ("completed", done.text, done.data_json, done.usage)
    said = [(one.role, one.content) for one in await store.list_messages(RUN, "a")]
    assert said == ([("user", done.turn), ("assistant", done.text)] if done.turn else [])
    texts = store._connection.execute("SELECT content FROM texts").fetchall()
    assert texts == ([(LONG,)] if "large" in unusual else [])


async def test_a_run_whose_tasks_are_impossible_is_named(store: MemoryStore) -> None:
    twice = replace(CREATED, tasks=(NewTask("a", "p"), NewTask("a", "q")))
    with pytest.raises(Conflict, match=r"^run 'run-1': RunCreated adds task 'a', which the run has already$"):
        await Writer(store).write(twice)
    alone = replace(CREATED, tasks=(NewTask("a", "p", ("x",)),))
    with pytest.raises(Conflict, match=r"^run 'run-1': RunCreated adds task 'a', which depends on 'x'; the run has no"):
        await Writer(store).write(alone)
    await Writer(store).write(CREATED)
    with pytest.raises(Conflict, match=r"^run 'run-1': RunCreated can only be change 1, not change 2$"):
        await store.write(Batch(RUN, 0, 2, (CREATED,)))


def test_a_run_remembers_the_tasks_that_have_not_ended() -> None:
    opened = apply_events(RUN, None, 1, OPENING).run
    run = apply_events(RUN, opened, 4, [START_A, DONE_A, replace(START_A, task_id="c")]).run
    assert (set(run.tasks), run.new) == ({"c"}, {"b": 1})
    reopened = replace(ENDS["failed"], task_id="c"), TaskReopened(at(5), "c", 1)
    run = apply_events(RUN, run, 7, reopened).run
    assert [(name, state.status) for name, state in run.tasks.items()] == [("c", "pending")]
