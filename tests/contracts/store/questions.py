"""The store contract: questions of a task to a person, and the answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plait.events import (
    Event,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskSkipped,
)
from plait.usage import Usage
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.samples import ASK, ASKED, ASKING, DONE_A, RUN, START_A, Writer, at, whole

if TYPE_CHECKING:
    from plait.persistence import Store
    from plait.persistence.store_records import TaskRecord

ANSWERED = TaskAnswered(at(5), "a", 1, '["this"]')


async def task_a(store: Store) -> TaskRecord:
    return (await store.list_tasks(RUN))[0]


class QuestionsContract(OpenedStore):
    """The question, the answers and the cost of a task that asks are stored."""

    async def test_the_attempt_of_a_task_that_asks_has_its_cost(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASK, ASKING)
        task = await task_a(store)
        assert (task.status, task.question, task.asked, task.answers) == (
            "waiting_input",
            "Which one?",
            '{"kind": "choice"}',
            None,
        )
        assert (task.session_id, task.text, task.error, task.crashes) == ("session-a", None, None, 0)
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.started_at, attempt.ended_at, attempt.error) == ("asked", at(3), at(4), None)
        for one in (task, attempt):
            assert (one.usage, one.duration_s) == (Usage(3, 2, 0.25, "sample-1"), 1.5)
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.counts, run.usage) == ({"waiting_input": 1, "pending": 2}, Usage(3, 2, 0.25))
        last = (await store.list_events(RUN))[-1]
        assert (last.kind, last.task_id, last.attempt, last.detail) == ("task_waiting_input", "a", 1, "{}")

    async def test_a_question_without_details_interrupts_the_attempt(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKED)
        task = await task_a(store)
        assert (task.question, task.asked) == ("Was it sent?", None)
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.duration_s, attempt.usage.cost_usd) == ("interrupted", None, None)

    async def test_answers_are_kept_until_other_answers_replace_them(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKING, ANSWERED)
        task = await task_a(store)
        assert (task.status, task.question, task.asked, task.answers) == ("pending", None, None, '["this"]')
        await writer.write(replace(START_A, attempt=2), TaskInterrupted(at(6), "a", 2, "stopped"))
        await writer.write(
            replace(START_A, attempt=3), TaskRetried(at(6), "a", 3, "transient", "no", 1.0), replace(START_A, attempt=4)
        )
        assert (await task_a(store)).answers == '["this"]'
        await writer.write(replace(ASKING, attempt=4), TaskAnswered(at(7), "a", 1))
        assert (await task_a(store)).answers == '["this"]'
        await writer.write(replace(START_A, attempt=5), replace(ASKING, attempt=5))
        await writer.write(TaskAnswered(at(8), "a", 1, '["this","that"]'))
        await writer.write(replace(START_A, attempt=6), replace(DONE_A, attempt=6))
        task = await task_a(store)
        assert (task.status, task.answers, task.asked, task.usage.input_tokens) == (
            "completed",
            '["this","that"]',
            None,
            3,
        )
        statuses = [attempt.status for attempt in await store.list_attempts(RUN)]
        assert statuses == ["asked", "interrupted", "retried", "asked", "asked", "completed"]
        assert [t.answers for t in await store.list_tasks(RUN)] == ['["this","that"]', None, None]

    @pytest.mark.parametrize(
        ("end", "status", "attempt_status"),
        [
            (TaskCompleted(at(6), "a", 1, "This one.", duration_s=2.0), "completed", "completed"),
            (
                TaskFailed(at(6), "a", 1, "declared_failed", "a person marked the task as failed", 2.0),
                "failed",
                "failed",
            ),
            (
                TaskSkipped(at(6), "a", 1, "declared_failed", "a person marked the task as failed", 2.0),
                "skipped",
                "skipped",
            ),
        ],
        ids=["completed", "failed", "skipped"],
    )
    async def test_a_decision_keeps_the_cost_of_the_question(
        self, store: Store, writer: Writer, end: Event, status: str, attempt_status: str
    ) -> None:
        await writer.write(START_A, ASKING)
        await writer.write(end)
        task = await task_a(store)
        assert (task.status, task.question, task.asked) == (status, None, None)
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.ended_at) == (attempt_status, at(6))
        assert (attempt.usage, attempt.duration_s) == (Usage(3, 2, 0.25, "sample-1"), 3.5)

    async def test_a_decision_may_add_cost(self, store: Store, writer: Writer) -> None:
        await writer.write(
            START_A, replace(ASKING, usage=replace(ASKING.usage, cost_usd=None)), replace(DONE_A, duration_s=0.25)
        )
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.usage, attempt.duration_s) == (Usage(6, 4, 0.25, "sample-1", cost_is_partial=True), 1.75)
        assert json.loads((await store.list_events(RUN))[-1].detail)["usage"] == {
            "input_tokens": 6,
            "output_tokens": 4,
            "cost_usd": 0.25,
            "model": "sample-1",
            "cost_is_partial": True,
        }

    async def test_a_waiting_task_with_a_question_is_cancelled(self, store: Store, writer: Writer) -> None:
        await writer.write(START_A, ASKING, TaskCancelled(at(6), "a", 1))
        task = await task_a(store)
        assert (task.status, task.question, task.asked, task.ended_at) == ("cancelled", None, None, at(4))
        (attempt,) = await store.list_attempts(RUN)
        assert (attempt.status, attempt.usage.cost_usd) == ("asked", 0.25)

    @pytest.mark.parametrize("damaged", [False, True])
    async def test_reopening_removes_the_answers(self, store: Store, writer: Writer, *, damaged: bool) -> None:
        end = replace(DONE_A, attempt=2) if damaged else TaskFailed(at(6), "a", 2, "auth", "no key")
        await writer.write(START_A, ASKING, ANSWERED, replace(START_A, attempt=2), end)
        assert (await task_a(store)).answers == '["this"]'
        await writer.write(TaskReopened(at(7), "a", 1, damaged=damaged))
        task = await task_a(store)
        assert (task.status, task.answers) == ("pending", None)

    async def test_asking_written_again_changes_nothing(self, store: Store, writer: Writer) -> None:
        batches = [await writer.write(change) for change in (START_A, ASKING, ANSWERED)]
        await writer.write(replace(START_A, attempt=2), replace(ASKING, attempt=2, usage=Usage(40)))
        before = await whole(store)
        for batch in batches:
            await store.write(batch)
        assert await whole(store) == before
        run = await store.get_run(RUN)
        assert run is not None
        assert run.usage.input_tokens == 43
