"""The store contract: tasks added to a running run, and the state of the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plait.errors import Conflict
from plait.events import NewTask, PolicyDecided, RunClaimed, TasksAdded, TaskStarted
from plait.persistence import Batch
from tests.contracts.store.opened import OpenedStore, Reopen
from tests.contracts.store.samples import (
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
    owner,
    run_becomes,
    whole,
    without_messages,
)

if TYPE_CHECKING:
    from pathlib import Path

    from plait.events import Event
    from plait.persistence import Store

MORE = (
    NewTask("d", "After {{ a }}.", ("a", "e"), "deep", '{"weight": 3}'),
    NewTask("e", "Alone."),
    NewTask("f", "Last of all.", ("b", "d")),
)
ADDED = TasksAdded(at(5), MORE, "a")
IMPOSSIBLE = {
    "there already": (TasksAdded(at(5), (NewTask("new", "p"), NewTask("c", "p"))), "'c'"),
    "twice": (TasksAdded(at(5), (NewTask("new", "p"), NewTask("new", "q"))), "'new'"),
    "unknown dependency": (TasksAdded(at(5), (NewTask("new", "p", ("a", "missing")),)), "'new'.*'missing'"),
    "added by nobody": (TasksAdded(at(5), (NewTask("new", "p"),), "missing"), "'missing'"),
    "added by itself": (TasksAdded(at(5), (NewTask("new", "p"),), "new"), "'new'"),
    "nothing, by nobody": (TasksAdded(at(5), (), "missing"), "'missing'"),
}


class GrowthContract(OpenedStore):
    """Added tasks and policy states are stored with the run."""

    @pytest.mark.parametrize("count", [1, 512, 513, 1025])
    async def test_a_batch_of_any_size_is_kept_whole(self, store: Store, writer: Writer, count: int) -> None:
        # 512 rows are the most that a statement of SQLite takes here.
        ids = [f"t{number}" for number in range(count)]
        await writer.write(TasksAdded(at(3), tuple(NewTask(name, "p") for name in ids)))
        await writer.write(*(replace(START_A, task_id=name) for name in ids))
        await writer.write(*(replace(DONE_A, task_id=name) for name in ids))
        added = (await store.list_tasks(RUN))[-count:]
        assert [task.task_id for task in added] == ids
        assert {(task.status, task.text) for task in added} == {("completed", DONE_A.text)}

    async def test_added_tasks_follow_the_existing_tasks(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, DONE_A, ADDED)
        await writer.write(TasksAdded(at(6), (NewTask("g", "Then.", ("f",)),)))
        tasks = await store.list_tasks(RUN)
        assert [(t.task_id, t.position, t.added_by) for t in tasks] == [
            ("a", 0, None),
            ("b", 1, None),
            ("c", 2, None),
            ("d", 3, "a"),
            ("e", 4, "a"),
            ("f", 5, "a"),
            ("g", 6, None),
        ]
        assert [NewTask(t.task_id, t.prompt, t.depends_on, t.backend, t.spec) for t in tasks[3:6]] == list(MORE)
        assert {(t.status, t.attempt, t.text, t.started_at) for t in tasks[3:]} == {("pending", 0, None, None)}
        run = await store.get_run(RUN)
        assert run is not None
        assert run.counts == {"completed": 1, "pending": 6}
        events = [(e.seq, e.at, e.kind, e.task_id, e.attempt, e.detail) for e in await store.list_events(RUN)][-2:]
        assert events == [
            (6, at(5), "tasks_added", "a", None, '{"tasks":3}'),
            (7, at(6), "tasks_added", None, None, '{"tasks":1}'),
        ]

    async def test_added_tasks_run_like_others(self, store: Store, writer: Writer) -> None:
        start = TaskStarted(at(6), "e", 1, "fast")
        await writer.write(ADDED, start, replace(DONE_A, task_id="e"), TaskStarted(at(6), "d", 1, "deep"))
        by_id = {task.task_id: task for task in await store.list_tasks(RUN)}
        assert (by_id["e"].status, by_id["e"].text, by_id["d"].status) == ("completed", "The Moon.", "running")
        with pytest.raises(Conflict, match="'e'"):
            await writer.write(start)

    async def test_a_later_process_adds_tasks_of_tasks_that_it_has_not_touched(
        self, tmp_path: Path, reopen: Reopen
    ) -> None:
        async with self.open_store(tmp_path) as store:
            writer = Writer(store)
            await writer.write(*OPENING)
        async with reopen(tmp_path) as writer.store:
            with pytest.raises(Conflict, match="'nobody' as the adding task"):
                await writer.write(TasksAdded(at(5), (NewTask("d", "p"),), "nobody"))
            await writer.write(TasksAdded(at(5), (NewTask("d", "p", ("b",), "deep"),), "a"))
            task = (await writer.store.list_tasks(RUN))[3]
            assert (task.task_id, task.added_by, task.depends_on, task.backend) == ("d", "a", ("b",), "deep")

    async def test_one_batch_may_create_and_add_again_and_again(self, store: Store) -> None:
        writer = Writer(store)
        one, two = TasksAdded(at(3), (NewTask("d", "p", ("c",)),)), TasksAdded(at(4), (NewTask("e", "p", ("d",)),), "d")
        await writer.write(*OPENING, START_A, one, replace(START_A, task_id="d"), two, DONE_A)
        tasks = await store.list_tasks(RUN)
        assert [(t.task_id, t.position, t.status, t.added_by) for t in tasks] == [
            ("a", 0, "completed", None),
            ("b", 1, "pending", None),
            ("c", 2, "pending", None),
            ("d", 3, "running", None),
            ("e", 4, "pending", "d"),
        ]

    async def test_a_run_of_no_tasks_may_grow(self, store: Store) -> None:
        writer = Writer(store)
        await writer.write(replace(CREATED, tasks=()))
        await writer.write(TasksAdded(at(3), ()), TasksAdded(at(3), (NewTask("a", "p"), NewTask("b", "p", ("a",)))))
        assert [(t.task_id, t.position) for t in await store.list_tasks(RUN)] == [("a", 0), ("b", 1)]
        details = [(e.kind, e.detail) for e in await store.list_events(RUN)][1:]
        assert details == [("tasks_added", '{"tasks":0}'), ("tasks_added", '{"tasks":2}')]

    async def test_many_tasks_are_added_at_once(self, store: Store, writer: Writer) -> None:
        ids = [f"t{number}" for number in range(2500)]
        tasks = [NewTask(task_id, "p", ("a", *ids[max(0, n - 2) : n])) for n, task_id in enumerate(ids)]
        await writer.write(TasksAdded(at(5), tuple(tasks)))
        stored = await store.list_tasks(RUN)
        assert [(t.task_id, t.position) for t in stored[3:]] == [(task_id, 3 + n) for n, task_id in enumerate(ids)]
        before = await without_messages(store)
        with pytest.raises(Conflict, match="'t2499'"):
            await writer.write(
                TasksAdded(at(5), (*(NewTask(f"u{n}", "p") for n in range(2500)), NewTask("t2499", "p")))
            )
        assert await without_messages(store) == before

    @pytest.mark.parametrize("why", IMPOSSIBLE)
    async def test_impossible_tasks_are_refused_with_all_of_their_batch(
        self, store: Store, writer: Writer, why: str
    ) -> None:
        change, named = IMPOSSIBLE[why]
        before = await whole(store)
        with pytest.raises(Conflict, match=f"'run-1': TasksAdded .*{named}"):
            await writer.write(START_A, TasksAdded(at(4), (NewTask("d", "p"),)), change, DONE_A)
        assert await whole(store) == before
        with pytest.raises(Conflict, match=named):
            await writer.write(change)
        assert await whole(store) == before
        await writer.write(START_A, ADDED)

    async def test_a_refused_batch_adds_no_tasks(self, store: Store, writer: Writer) -> None:
        before = await whole(store)
        with pytest.raises(Conflict, match="'b'"):
            await writer.write(ADDED, PolicyDecided(at(5), "{}"), replace(DONE_A, task_id="b"))
        assert await whole(store) == before

    async def test_runs_have_separate_task_ids(self, store: Store, writer: Writer) -> None:
        other = Writer(store, "other")
        await other.write(*OPENING, TasksAdded(at(3), (NewTask("x", "p"),)))
        with pytest.raises(Conflict, match="'x'"):
            await writer.write(TasksAdded(at(3), (NewTask("y", "p", ("x",)),)))
        await writer.write(TasksAdded(at(3), (NewTask("x", "p"),)))
        assert [t.position for t in await store.list_tasks(RUN)] == [0, 1, 2, 3]
        for some in (range(0), range(1, 3), range(3, 9), range(4, 9)):
            assert [t.position for t in await store.list_tasks(RUN, some)] == [n for n in some if n < 4]

    async def test_growth_written_again_changes_nothing(self, store: Store, writer: Writer) -> None:
        changes: tuple[Event, ...] = (ADDED, PolicyDecided(at(5), "1"), replace(START_A, task_id="e"))
        for kept in range(len(changes) + 1):
            await store.write(Batch(RUN, 1, 4, changes[:kept]))
        batch = await writer.write(*changes)
        once = await whole(store)
        await writer.write(PolicyDecided(at(6), "2"), TasksAdded(at(6), (NewTask("g", "p"),)))
        grown = await whole(store)
        await store.write(batch)
        await store.write(Batch(RUN, 1, 4, changes[:1]))
        assert await whole(store) == grown
        assert ([t.task_id for t in once[1]], [t.task_id for t in grown[1]]) == ([*"abcdef"], [*"abcdefg"])

    async def test_only_the_last_decision_counts(self, store: Store, writer: Writer) -> None:
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.policy_state, run.policy_seq) == (None, 0)
        await writer.write(
            PolicyDecided(at(4), '{"step":1}'), START_A, PolicyDecided(at(5), '{"step":"\U0001f311"}'), DONE_A
        )
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.policy_state, run.policy_seq, run.last_seq) == ('{"step":"\U0001f311"}', 6, 7)
        events = [(e.seq, e.task_id, e.attempt, e.detail) for e in await store.list_events(RUN) if "policy" in e.kind]
        assert events == [(4, None, None, "{}"), (6, None, None, "{}")]
        assert {e.kind for e in await store.list_events(RUN)} >= {"policy_decided"}
        assert [(run.policy_state, run.policy_seq) for run in await store.list_runs()] == [('{"step":"\U0001f311"}', 6)]

    async def test_a_decision_outlasts_owners_and_statuses(self, store: Store, writer: Writer) -> None:
        await writer.write(PolicyDecided(at(4), "1"))
        await writer.write(run_becomes(at(5), "failed", "why"), RunClaimed(at(6), owner("next"), 1.0))
        await writer.write(run_becomes(at(6), "running", resumed=True))
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.policy_state, run.policy_seq, run.error) == ("1", 4, None)

    @pytest.mark.parametrize("change", [ADDED, PolicyDecided(at(5), "{}")], ids=["tasks added", "policy decided"])
    async def test_an_unknown_run_neither_grows_nor_decides(self, store: Store, change: Event) -> None:
        for first_seq in (1, 4):
            with pytest.raises(Conflict, match="'run-1' is not in the store"):
                await store.write(Batch(RUN, 0, first_seq, (change,)))
        assert await store.list_runs() == ()
