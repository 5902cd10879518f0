"""The store contract: reads return the written values, and only allowed changes are written."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest

from plait.dialogue import Message
from plait.errors import Conflict
from plait.events import (
    HISTORY,
    Event,
    LeaseRenewed,
    NewTask,
    RunClaimed,
    RunParked,
    RunReleased,
    SessionOpened,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import MessageRecord, Store
from plait.persistence.store_records import THOUGHTS
from plait.usage import Usage
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    ASKING,
    AT_START,
    CLAIMED,
    CREATED,
    DONE_A,
    LEGAL,
    NEXT,
    OPENING,
    RUN,
    RUN_LEGAL,
    RUN_RESUMED,
    RUN_WAY,
    RUNNING,
    START_A,
    TASKS,
    Writer,
    at,
    case,
    message,
    owner,
    run_becomes,
    whole,
)

TURN = (Message("user", "Which?"), Message("assistant", "The Moon.", Usage(3, 2), thoughts="Hm."))


class ReadsContract(OpenedStore):
    """Reads return the written values; statuses follow the table."""

    # Reads return the written values.

    async def test_an_unknown_run_reads_as_nothing(self, store: Store) -> None:
        assert await whole(store, "nobody") == (None, (), (), [], ())
        assert await store.list_messages("nobody", "a") == ()
        assert await store.list_runs() == ()

    async def test_a_new_run_is_there_with_its_tasks_and_edges(self, store: Store) -> None:
        await Writer(store).write(CREATED)
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.status, run.epoch, run.last_seq, run.owner, run.counts) == ("queued", 0, 1, None, {"pending": 3})
        assert (run.name, run.settings, run.created_at) == ("moon", '{"concurrency": 8}', at(0))
        assert (run.started_at, run.ended_at, run.error, run.lease_expires_at) == (None, None, None, None)
        assert (run.policy_state, run.policy_seq) == (None, 0)
        stored = await store.list_tasks(RUN)
        assert [(t.task_id, t.prompt, t.depends_on, t.backend, t.spec) for t in stored] == [
            (t.task_id, t.prompt, t.depends_on, t.backend, t.spec) for t in TASKS
        ]
        assert [(t.position, t.status, t.attempt, t.text) for t in stored] == [
            (i, "pending", 0, None) for i in range(3)
        ]

    async def test_one_task_reads_as_among_all(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, ANSWER, DONE_A)
        await Writer(store, "another").write(CREATED)
        tasks = await store.list_tasks(RUN)
        assert [await store.list_tasks(RUN, task.task_id) for task in tasks] == [(task,) for task in tasks]
        assert await store.list_tasks(RUN, "A") == await store.list_tasks("nobody", "a") == ()

    async def test_a_completed_task_has_its_result_usage_session_and_times(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, ANSWER, DONE_A)
        task = (await store.list_tasks(RUN))[0]
        assert (task.status, task.attempt, task.text, task.data) == ("completed", 1, "The Moon.", '{"moon": true}')
        assert (task.session_id, task.started_at, task.ended_at) == ("session-a", at(3), at(4))
        assert (task.usage, task.duration_s, task.damaged) == (Usage(3, 2, 0.25, "sample-1"), 1.5, False)
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.counts, run.usage) == ({"completed": 1, "pending": 2}, Usage(3, 2, 0.25))
        assert (run.started_at, run.owner, run.lease_expires_at) == (at(2), owner(), 1000.5)

    async def test_a_cancelled_attempt_keeps_what_it_had_cost(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, TaskCancelled(at(4), "a", 1, Usage(7, 5, 0.5)), TaskCancelled(at(4), "c", 1))
        tasks = {task.task_id: task for task in await store.list_tasks(RUN)}
        assert (tasks["a"].usage, tasks["c"].usage) == (Usage(7, 5, 0.5), Usage())
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.usage) == ("cancelled", Usage(7, 5, 0.5))
        run = await store.get_run(RUN)
        assert run is not None
        assert run.usage == Usage(7, 5, 0.5)

    async def test_messages_keep_their_order_over_many_writes(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK)
        await writer.write(ANSWER, message(at(5), "c", 0, "user", "to another task"))
        await writer.write(message(at(6), "a", 0, "user", "and now?"))
        messages = await store.list_messages(RUN, "a")
        assert [(m.position, m.attempt, m.role, m.content) for m in messages] == [
            (0, 1, "user", "First."),
            (1, 1, "assistant", "The Moon."),
            (2, 0, "user", "and now?"),
        ]
        assert [(m.input_tokens, m.output_tokens, m.at, m.damaged) for m in messages][:1] == [(3, 0, at(3), False)]

    async def test_each_attempt_has_the_status_of_its_end(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, TaskStarted(at(3), "c", 1, "deep"), *AT_START["retried"][1:])
        await writer.write(TaskStarted(at(5), "a", 2, "fast"), TaskInterrupted(at(6), "a", 2, "stopped"))
        await writer.write(TaskStarted(at(7), "a", 3, "fast"))
        attempts = await store.list_attempts(RUN)
        assert [(a.task_id, a.attempt, a.status, a.ended_at) for a in attempts] == [
            ("a", 1, "retried", at(4)),
            ("c", 1, "running", None),
            ("a", 2, "interrupted", at(6)),
            ("a", 3, "running", None),
        ]
        assert (attempts[0].error_kind, attempts[0].error, attempts[0].backend) == ("transient", "reset", "fast")
        assert [a.attempt for a in await store.list_attempts(RUN, "a")] == [1, 2, 3]
        assert [a.backend for a in await store.list_attempts(RUN, "c")] == ["deep"]
        assert (await store.list_tasks(RUN))[0].error is None

    async def test_a_session_that_becomes_known_or_changes_is_kept(self, store: Store, writer: Writer) -> None:
        await writer.write(TaskStarted(at(3), "a", 1, "fast"), SessionOpened(at(4), "a", 1, "one"))
        assert (await store.list_tasks(RUN))[0].session_id == "one"
        await writer.write(SessionOpened(at(5), "a", 1, "two"), SessionOpened(at(5), "a", 1, "three"))
        assert (await store.list_tasks(RUN))[0].session_id == "three"
        await writer.write(DONE_A, SessionOpened(at(6), "a", 0, "a person's"))
        assert (await store.list_tasks(RUN))[0].session_id == "a person's"
        with pytest.raises(Conflict, match="SessionOpened"):
            await writer.write(SessionOpened(at(5), "c", 1, "never started"))
        with pytest.raises(Conflict, match="SessionOpened"):
            await writer.write(SessionOpened(at(7), "a", 2, "of an attempt that is not the last"))

    async def test_events_are_the_history(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, SessionOpened(at(4), "a", 1, "s"), ANSWER, LeaseRenewed(at(9), 2000.0), DONE_A)
        await writer.write(
            *(replace(cast("Any", change), task_id="c") for change in AT_START["skipped"]), RunReleased(at(8))
        )
        events = await store.list_events(RUN)
        assert [(e.seq, e.kind, e.task_id, e.attempt) for e in events] == [
            (1, "run_created", None, None),
            (3, "run_started", None, None),
            (4, "task_started", "a", 1),
            (6, "session_opened", "a", 1),
            (9, "task_completed", "a", 1),
            (10, "task_started", "c", 1),
            (11, "task_skipped", "c", 1),
        ]
        assert [e.seq for e in await store.list_events(RUN, after=4, limit=2)] == [6, 9]
        pages = [await store.list_events(RUN, after=seq, limit=1) for seq in (0, 1, 3, 4, 6, 9, 10)]
        assert tuple(event for page in pages for event in page) == events
        for after in (11, 12, 99):
            assert await store.list_events(RUN, after) == ()
        assert await store.list_events(RUN, limit=0) == await store.list_events(RUN, limit=-1) == ()
        assert await store.list_events(RUN, after=-5) == events
        for kind in HISTORY:
            assert await store.list_events(RUN, kind=kind) == tuple(e for e in events if e.kind == kind)
        assert [e.seq for e in await store.list_events(RUN, after=4, kind=TaskStarted.kind)] == [10]
        assert [e.seq for e in await store.list_events(RUN, limit=1, kind=TaskStarted.kind)] == [4]
        assert [json.loads(e.detail) for e in events[2:5:2]] == [
            {"backend": "fast"},
            {"usage": {"input_tokens": 3, "output_tokens": 2, "cost_usd": 0.25, "model": "sample-1"}},
        ]
        assert not any("Moon" in e.detail or "First" in e.detail for e in events)

    async def test_runs_are_listed_newest_first_without_settings(self, store: Store) -> None:
        for number in range(4):
            await Writer(store, f"run-{number}").write(replace(CREATED, at=at(min(number, 2))))
        runs = await store.list_runs(3)
        assert [(run.run_id, run.settings, run.counts) for run in runs] == [
            (run_id, "", {"pending": 3}) for run_id in ("run-3", "run-2", "run-1")
        ]

    async def test_claimable_runs_are_listed_oldest_first(self, store: Store) -> None:
        long_ago, later = replace(CLAIMED, lease_expires_at=1000.0), replace(CLAIMED, lease_expires_at=4e10)
        waits = run_becomes(at(3), "waiting_input"), RunReleased(at(3))
        runs: dict[str, tuple[Event, ...]] = {
            "owned": (later, RUNNING),
            "released": (later, RUNNING, RunReleased(at(3))),
            "queued": (),
            "dead": (long_ago, RUNNING),
            "cancelling": (long_ago, RUNNING, run_becomes(at(3), "cancelling")),
            "waiting": (later, RUNNING, *waits),
            "to be answered later": (later, RUNNING, waits[0], RunReleased(at(3), 4e10)),
            "due": (later, RUNNING, waits[0], RunReleased(at(3), 1000.0)),
            "answered": (later, RUNNING, *waits, CLAIMED, RunReleased(at(4), 0.0)),
            "ended and due": (later, RUNNING, run_becomes(at(3), "failed"), RunReleased(at(3), 0.0)),
            "parked": (later, RUNNING, RunParked(at(3), "parked", until="2100-01-01T00:00:00.000Z")),
            "parked and due": (later, RUNNING, RunParked(at(3), "parked and due", until="2001-01-01T00:00:00.000Z")),
            "due, and owned": (later, RUNNING, waits[0], RunReleased(at(3), 0.0), later),
            "completed": (later, RUNNING, run_becomes(at(3), "completed"), RunReleased(at(3))),
        }
        for number, (run_id, changes) in enumerate(runs.items()):
            await Writer(store, run_id).write(replace(CREATED, at=at(number)), *changes)
        found = await store.list_claimable()
        assert [run.run_id for run in found] == [
            "released", "queued", "dead", "cancelling", "due", "answered", "parked and due",
        ]  # fmt: skip
        assert {run.settings for run in found} == {""}
        assert [run.run_id for run in await store.list_claimable(2)] == ["released", "queued"]
        assert await store.list_claimable(0) == ()

    async def test_a_lease_expires_by_the_clock_of_the_store(self, store: Store) -> None:
        for expires in (1000.0, 4e10):
            run_id = f"until {expires}"
            writer = Writer(store, run_id)
            await writer.write(CREATED, replace(CLAIMED, lease_expires_at=expires), RUNNING)
            run = await store.get_run(run_id)
            assert run is not None
            assert run.lease_has_expired is (expires == 1000.0)
            assert [one.lease_has_expired for one in await store.list_runs() if one.run_id == run_id] == [
                run.lease_has_expired
            ]
            await writer.write(run_becomes(at(3), "waiting_input"), RunReleased(at(3), 1000.0))
            run = await store.get_run(run_id)
            assert run is not None
            assert not run.lease_has_expired

    async def test_the_owner_leaves_and_the_run_ends(self, store: Store, writer: Writer) -> None:
        await writer.write(LeaseRenewed(at(9), 5000.0))
        run = await store.get_run(RUN)
        assert run is not None
        assert run.lease_expires_at == 5000.0
        await writer.write(run_becomes(at(9), "failed", "task b failed"), RunReleased(at(9)))
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.status, run.error, run.ended_at, run.owner) == ("failed", "task b failed", at(9), None)
        assert run.lease_expires_at is None
        await writer.write(RunClaimed(at(10), owner("next"), 1.0), run_becomes(at(10), "running", resumed=True))
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.status, run.error, run.ended_at, run.started_at, run.epoch) == ("running", None, None, at(2), 2)

    # Allowed changes are applied, all others are refused.

    # Each change meets a run of its own; one store has all of the runs.

    @pytest.mark.parametrize("state", AT_START)
    async def test_task_transitions(self, store: Store, state: str) -> None:
        for name, change in NEXT.items():
            with case(name):
                writer = Writer(store, name)
                await writer.write(*OPENING, *AT_START[state])
                expected = LEGAL[state].get(name)
                if expected is None:
                    before = await whole(store, name)
                    with pytest.raises(Conflict, match="task 'a'"):
                        await writer.write(message(at(6), "c", 0, "user", "not to be kept"), change)
                    assert await whole(store, name) == before
                else:
                    await writer.write(change)
                    assert (await store.list_tasks(name))[0].status == expected

    @pytest.mark.parametrize("state", AT_START)
    async def test_one_batch_decides_as_two_batches(self, store: Store, state: str) -> None:
        for name, change in NEXT.items():
            with case(name):
                writer = Writer(store, name)
                await writer.write(*OPENING)
                expected = LEGAL[state].get(name)
                if expected is None:
                    before = await whole(store, name)
                    with pytest.raises(Conflict):
                        await writer.write(*AT_START[state], change)
                    assert await whole(store, name) == before
                else:
                    await writer.write(*AT_START[state], change)
                    assert (await store.list_tasks(name))[0].status == expected

    @pytest.mark.parametrize("change", ["complete", "fail", "retry", "interrupt", "ask"])
    async def test_an_attempt_that_is_not_the_last_cannot_end(self, store: Store, writer: Writer, change: str) -> None:
        await writer.write(START_A)
        before = await whole(store)
        for attempt in (0, 2):
            with pytest.raises(Conflict, match=rf"task 'a' \(attempt {attempt}\) does not follow: .* attempt 1"):
                await writer.write(replace(cast("Any", NEXT[change]), attempt=attempt))
        assert await whole(store) == before

    @pytest.mark.parametrize("old", RUN_LEGAL)
    async def test_run_transitions(self, store: Store, old: str) -> None:
        for new, resumed in product([status for status in RUN_LEGAL if status != "queued"], [False, True]):
            run_id = f"{new}, resumed" if resumed else new
            with case(run_id):
                writer, change = Writer(store, run_id), run_becomes(at(2), new, resumed=resumed)
                await writer.write(CREATED, *(run_becomes(at(1), status) for status in RUN_WAY[old]))
                before = await whole(store, run_id)
                goes_on = resumed and new == "running"
                if old in RUN_RESUMED if goes_on else new in RUN_LEGAL[old]:
                    await writer.write(change)
                    run, *_, events = await whole(store, run_id)
                    assert run.status == new
                    started = "run_resumed" if resumed else "run_started"
                    assert events[-1].kind == (started if new == "running" else f"run_{new}")
                else:
                    with pytest.raises(Conflict, match=f"is {old} and cannot become {new}"):
                        await writer.write(change)
                    assert await whole(store, run_id) == before

    async def test_a_run_continues_with_another_owner(self, store: Store, writer: Writer) -> None:
        resumed = run_becomes(at(6), "running", resumed=True)
        batch = await writer.write(RunClaimed(at(6), owner("next"), 1.0), resumed)
        await store.write(batch)
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.status, run.started_at, run.ended_at, run.error, run.epoch) == ("running", at(2), None, None, 2)
        kinds = [(e.seq, e.kind, e.detail) for e in await store.list_events(RUN)]
        assert kinds == [
            (1, "run_created", '{"tasks":3}'),
            (3, "run_started", "{}"),
            (5, "run_resumed", '{"previous":"failed","reused":0}'),
        ]

    @pytest.mark.parametrize(
        "change",
        [
            TaskStarted(at(1), "x", 1, "fast"),
            TaskCompleted(at(1), "x", 1, "text"),
            TaskCancelled(at(1), "x", 1),
            TaskReopened(at(1), "x", 1),
            TaskReopened(at(1), "x", 1, damaged=True),
            TaskWaiting(at(1), "x", 1, "?"),
            TaskAnswered(at(1), "x", 1),
            message(at(1), "x", 1, "user", "text"),
            SessionOpened(at(1), "x", 1, "s"),
        ],
        ids=lambda change: type(change).__name__,
    )
    async def test_an_unknown_task_is_refused(self, store: Store, writer: Writer, change: Event) -> None:
        before = await whole(store)
        with pytest.raises(Conflict, match="'x'"):
            await writer.write(START_A, change, DONE_A)
        assert await whole(store) == before

    @pytest.mark.parametrize(
        "tasks",
        [(NewTask("a", "p"), NewTask("a", "q")), (NewTask("a", "p", ("missing",)),)],
        ids=["twice", "unknown dependency"],
    )
    async def test_a_run_of_impossible_tasks_is_refused(self, store: Store, tasks: tuple[NewTask, ...]) -> None:
        with pytest.raises(Conflict):
            await Writer(store).write(replace(CREATED, tasks=tasks))
        assert await store.list_runs() == ()

    # The turn of an attempt is stored with its end.

    @pytest.mark.parametrize(
        "end",
        [
            TaskCompleted(at(4), "a", 1, "The Moon.", turn=TURN),
            TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, messages=TURN),
            TaskFailed(at(4), "a", 1, "auth", "no key", messages=TURN),
            replace(ASKING, messages=TURN),
        ],
        ids=lambda end: type(end).__name__,
    )
    async def test_the_end_of_an_attempt_stores_its_turn(self, store: Store, writer: Writer, end: Event) -> None:
        await writer.write(START_A, end)
        assert await store.list_messages(RUN, "a") == (
            MessageRecord("a", 0, 1, "user", "Which?", 0, 0, at(4)),
            MessageRecord("a", 1, 1, THOUGHTS, "Hm.", 0, 0, at(4)),
            MessageRecord("a", 2, 1, "assistant", "The Moon.", 3, 2, at(4)),
        )

    # A completion with its prompt: prompt and text become messages of the task.

    async def test_a_prompt_and_its_answer_are_messages(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, *AT_START["retried"][1:], replace(START_A, attempt=2))
        await writer.write(message(at(3), "a", 2, "user", "Wait.", 3), replace(DONE_A, attempt=2, turn="First?"))
        await writer.write(message(at(6), "a", 0, "user", "and now?"), replace(START_A, task_id="c"))
        await writer.write(replace(DONE_A, task_id="c", turn="", data_json=None))
        assert await store.list_messages(RUN, "a") == (
            MessageRecord("a", 0, 1, "user", "First.", 3, 0, at(3)),
            MessageRecord("a", 1, 2, "user", "Wait.", 3, 0, at(3)),
            MessageRecord("a", 2, 2, "user", "First?", 0, 0, at(4)),
            MessageRecord("a", 3, 2, "assistant", "The Moon.", 3, 2, at(4)),
            MessageRecord("a", 4, 0, "user", "and now?", 0, 0, at(6)),
        )
        assert [m.content for m in await store.list_messages(RUN, "c")] == ["", "The Moon."]

    async def test_a_damaged_answer_is_discarded_with_its_result(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, replace(DONE_A, turn="First?"), message(at(6), "a", 0, "user", "And?"))
        await writer.write(TaskReopened(at(7), "a", 1, damaged=True), replace(START_A, attempt=2))
        messages = await store.list_messages(RUN, "a")
        assert [(m.position, m.content, m.damaged) for m in messages] == [
            (0, "First.", False),
            (1, "First?", False),
            (2, "And?", False),
        ]
        await writer.write(replace(DONE_A, attempt=2, turn="Once more?"))
        messages = await store.list_messages(RUN, "a")
        assert [m.content for m in messages if m.attempt == 2] == ["Once more?", "The Moon."]
        assert not any(m.damaged for m in messages)
