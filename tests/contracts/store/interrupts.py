"""The store contract: crashes, questions to a person after a crash, and damaged results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plait.events import (
    BackendThrottled,
    Event,
    HostAway,
    NodeStarted,
    SessionOpened,
    TaskAdopted,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskPlaced,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
)
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.samples import ASK, ASKED, DONE_A, RUN, START_A, Writer, at, whole

if TYPE_CHECKING:
    from plait.persistence import Store
    from plait.persistence.store_records import TaskRecord

CRASHED = TaskInterrupted(at(4), "a", 1, "its process ended", crashed=True)


async def task_a(store: Store) -> TaskRecord:
    return (await store.list_tasks(RUN))[0]


class InterruptsContract(OpenedStore):
    """Attempts that ended with their owner are stored, and their tasks can run again."""

    async def test_crashes_are_counted_over_all_attempts(self, store: Store, writer: Writer) -> None:
        assert (await task_a(store)).crashes == 0
        await writer.write(START_A, replace(CRASHED, crashed=False))
        assert (await task_a(store)).crashes == 0
        await writer.write(replace(START_A, attempt=2), replace(CRASHED, attempt=2))
        await writer.write(replace(START_A, attempt=3), replace(ASKED, attempt=3), TaskAnswered(at(5), "a", 1))
        assert [task.crashes for task in await store.list_tasks(RUN)] == [2, 0, 0]
        await writer.write(replace(START_A, attempt=4), replace(DONE_A, attempt=4))
        assert (await task_a(store)).crashes == 2

    async def test_adoption_adds_only_an_event(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A)
        before = await store.list_tasks(RUN), await store.list_attempts(RUN, "a")
        await writer.write(TaskAdopted(at(4), "a", 1, "fast"))
        assert (await store.list_tasks(RUN), await store.list_attempts(RUN, "a")) == before
        told = (await store.list_events(RUN))[-1]
        assert (told.at, told.kind, told.task_id, told.attempt, told.detail) == (
            at(4),
            "task_adopted",
            "a",
            1,
            '{"backend":"fast"}',
        )

    async def test_the_start_of_a_node_adds_only_an_event(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A)
        before = await store.list_tasks(RUN), await store.list_attempts(RUN, "a")
        await writer.write(NodeStarted(at(4), "a", 1, 'plan "B"'))
        assert (await store.list_tasks(RUN), await store.list_attempts(RUN, "a")) == before
        told = (await store.list_events(RUN))[-1]
        assert (told.at, told.kind, told.task_id, told.attempt) == (at(4), "node_started", "a", 1)
        assert told.detail == '{"node":"plan \\"B\\""}'

    async def test_the_host_of_an_attempt_adds_only_an_event(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A)
        before = await store.list_tasks(RUN), await store.list_attempts(RUN, "a")
        await writer.write(TaskPlaced(at(4), "a", 1, "m3"), TaskPlaced(at(5), "a", 1, "m1", interrupted=True))
        assert (await store.list_tasks(RUN), await store.list_attempts(RUN, "a")) == before
        first, second = await store.list_events(RUN, kind=TaskPlaced.kind)
        assert (first.at, first.kind, first.task_id, first.attempt) == (at(4), "task_placed", "a", 1)
        assert (first.detail, second.detail) == ('{"place":"m3"}', '{"place":"m1","interrupted":true}')

    async def test_a_throttled_backend_adds_only_an_event(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A)
        before = await store.list_tasks(RUN), await store.list_attempts(RUN, "a")
        await writer.write(BackendThrottled(at(4), "fast", at(9), "429", 2, 4))
        await writer.write(BackendThrottled(at(9), "fast", None, "429", 2, 4))
        assert (await store.list_tasks(RUN), await store.list_attempts(RUN, "a")) == before
        paused, opened = (await store.list_events(RUN))[-2:]
        assert (paused.at, paused.kind, paused.task_id, paused.attempt) == (at(4), "backend_throttled", None, None)
        assert json.loads(paused.detail) == {"backend": "fast", "until": at(9), "cause": "429", "slots": 2, "total": 4}
        assert json.loads(opened.detail) == {"backend": "fast", "until": None, "cause": "429", "slots": 2, "total": 4}

    async def test_a_host_that_is_away_adds_only_an_event(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A)
        before = await store.list_tasks(RUN), await store.list_attempts(RUN, "a")
        await writer.write(HostAway(at(4), "m3", at(3), "timed out", ("a", "b")), HostAway(at(9), "m3", None, "", ()))
        assert (await store.list_tasks(RUN), await store.list_attempts(RUN, "a")) == before
        away, back = await store.list_events(RUN, kind=HostAway.kind)
        assert (away.at, away.kind, away.task_id, away.attempt) == (at(4), "host_away", None, None)
        assert json.loads(away.detail) == {"host": "m3", "since": at(3), "reason": "timed out", "tasks": ["a", "b"]}
        assert json.loads(back.detail) == {"host": "m3", "since": None, "reason": "", "tasks": []}

    async def test_a_session_is_confirmed_for_one_attempt(self, store: Store, writer: Writer) -> None:
        async def confirmed(*changes: Event) -> bool:
            await writer.write(*changes)
            return (await task_a(store)).session_confirmed

        assert not await confirmed(START_A)
        assert await confirmed(SessionOpened(at(4), "a", 1, "session-a"))
        assert await confirmed(CRASHED)
        assert await confirmed(replace(START_A, attempt=2, confirmed=True))
        assert not await confirmed(replace(CRASHED, attempt=2), replace(START_A, attempt=3))
        assert await confirmed(SessionOpened(at(6), "a", 3, "one"), replace(DONE_A, attempt=3))
        assert await confirmed(SessionOpened(at(7), "a", 0, "a person's"))
        assert [task.session_confirmed for task in await store.list_tasks(RUN)] == [True, False, False]

    async def test_a_retry_confirms_only_the_session_that_it_continues(self, store: Store, writer: Writer) -> None:
        opened = SessionOpened(at(4), "a", 1, "session-a")
        retried = TaskRetried(at(5), "a", 1, "rate_limited", "later", 3600.0)
        await writer.write(START_A, opened, retried)
        assert not (await task_a(store)).session_confirmed
        goes_on = replace(retried, attempt=2, continues_session=True)
        await writer.write(replace(START_A, attempt=2, session_id="session-2"), goes_on)
        task = await task_a(store)
        assert (task.status, task.session_id, task.session_confirmed) == ("pending", "session-2", True)
        again = TaskStarted(at(6), "a", 3, "fast", "session-2", confirmed=True)
        await writer.write(again, replace(retried, attempt=3))
        task = await task_a(store)
        assert (task.status, task.session_id, task.session_confirmed) == ("pending", "session-2", False)
        told = [event.detail for event in await store.list_events(RUN) if event.kind == "task_retried"]
        assert [json.loads(detail).get("continues_session", False) for detail in told] == [False, True, False]

    async def test_a_question_ends_the_attempt(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, ASKED)
        task = await task_a(store)
        assert (task.status, task.question, task.attempt, task.crashes) == ("waiting_input", "Was it sent?", 1, 1)
        assert (task.text, task.damaged, task.session_id) == (None, False, "session-a")
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.ended_at, attempt.error, attempt.duration_s) == (
            "interrupted",
            at(4),
            None,
            None,
        )
        run = await store.get_run(RUN)
        assert run is not None
        assert run.counts == {"waiting_input": 1, "pending": 2}
        last = (await store.list_events(RUN))[-1]
        assert (last.kind, last.task_id, last.attempt, last.detail) == (
            "task_waiting_input",
            "a",
            1,
            '{"crashed":true}',
        )

    async def test_a_person_lets_the_task_run_again(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKED)
        await writer.write(TaskAnswered(at(6), "a", 1))
        task = await task_a(store)
        assert (task.status, task.question, task.attempt) == ("pending", None, 1)
        last = (await store.list_events(RUN))[-1]
        assert (last.kind, last.task_id, last.attempt) == ("task_answered", "a", 1)
        await writer.write(replace(START_A, attempt=2), TaskWaiting(at(7), "a", 2, "And now?"))
        task = await task_a(store)
        assert (task.question, task.crashes) == ("And now?", 1)
        assert [a.status for a in await store.list_attempts(RUN)] == ["interrupted", "interrupted"]

    async def test_a_person_states_the_result(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKED, TaskCompleted(at(6), "a", 1, "It was sent.", duration_s=0.0))
        task = await task_a(store)
        assert (task.status, task.text, task.question, task.crashes) == ("completed", "It was sent.", None, 1)
        assert (task.started_at, task.ended_at, task.session_id) == (at(3), at(6), "session-a")
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.started_at, attempt.ended_at) == ("completed", at(3), at(6))
        kinds = [(e.seq, e.kind) for e in await store.list_events(RUN)][-3:]
        assert kinds == [(4, "task_started"), (5, "task_waiting_input"), (6, "task_completed")]

    async def test_a_person_declares_the_task_failed(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKED, TaskFailed(at(6), "a", 1, "refused", "a person gave it up"))
        task = await task_a(store)
        assert (task.status, task.error_kind, task.question, task.ended_at) == ("failed", "refused", None, at(6))
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.error) == ("failed", "a person gave it up")

    async def test_a_task_that_waits_for_a_decision_is_cancelled(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKED, TaskCancelled(at(6), "a", 1))
        task = await task_a(store)
        assert (task.status, task.question, task.ended_at) == ("cancelled", None, at(4))
        assert [a.status for a in await store.list_attempts(RUN)] == ["interrupted"]

    @pytest.mark.parametrize("size", [10, 100_000])
    async def test_a_failed_task_is_reopened_with_another_prompt(self, store: Store, writer: Writer, size: int) -> None:
        await writer.write(START_A, TaskFailed(at(4), "a", 1, "refused", "no"))
        await writer.write(TaskReopened(at(5), "a", 1, prompt="y" * size))
        task = await task_a(store)
        assert (task.status, task.prompt, task.attempt) == ("pending", "y" * size, 1)
        assert (await store.list_events(RUN))[-1].detail == '{"prompt":"changed"}'
        await writer.write(replace(START_A, attempt=2), TaskInterrupted(at(7), "a", 2, "the process ended"))
        assert (await task_a(store)).prompt == "y" * size

    @pytest.mark.parametrize("size", [10, 100_000])
    async def test_a_discarded_damaged_result_can_be_replaced(self, store: Store, writer: Writer, size: int) -> None:
        done = replace(DONE_A, text="x" * size, data_json=f'"{"y" * size}"')
        await writer.write(START_A, ASK, done)
        await writer.write(TaskReopened(at(6), "a", 1, damaged=True))
        task = await task_a(store)
        assert (task.status, task.text, task.data, task.damaged, task.attempt) == ("pending", None, None, False, 1)
        assert [a.status for a in await store.list_attempts(RUN)] == ["completed"]
        await writer.write(replace(START_A, attempt=2), replace(done, attempt=2))
        task = await task_a(store)
        assert (task.text, task.data, task.damaged, task.attempt) == (done.text, done.data_json, False, 2)
        assert [a.status for a in await store.list_attempts(RUN)] == ["completed", "completed"]
        kinds = [(e.kind, e.attempt) for e in await store.list_events(RUN)][2:]
        assert kinds == [
            ("task_started", 1),
            ("task_completed", 1),
            ("task_reopened", 1),
            ("task_started", 2),
            ("task_completed", 2),
        ]

    async def test_waiting_written_again_changes_nothing(self, store: Store, writer: Writer) -> None:
        batches = [await writer.write(change) for change in (START_A, ASKED, TaskAnswered(at(5), "a", 1))]
        await writer.write(TaskStarted(at(6), "a", 2, "fast"))
        before = await whole(store)
        for batch in batches:
            await store.write(batch)
        assert await whole(store) == before

    async def test_only_attempts_confirm_and_reopening_resets(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, CRASHED, SessionOpened(at(5), "a", 0, "a person's"))
        task = await task_a(store)
        assert (task.session_id, task.session_confirmed) == ("a person's", False)
        done = (replace(START_A, attempt=2), SessionOpened(at(6), "a", 2, "one"), replace(DONE_A, attempt=2))
        await writer.write(*done)
        assert (await task_a(store)).session_confirmed
        await writer.write(TaskReopened(at(7), "a", 1, damaged=True))
        assert not (await task_a(store)).session_confirmed
