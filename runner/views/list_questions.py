"""The questions to a person, over all runs of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.domain.asked_question import OpenQuestion
from plait.runner.recovery.given_answers import first_notes, open_questions
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.views.find_runs import MOST_SEARCHED
from plait.runner.views.read_views import asks_as_json
from plait.statuses import RUN_DONE, RunStatus, TaskStatus


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A task that waits for a person."""

    run_id: str
    run_name: str
    task_id: str
    attempt: int
    """The number of the attempt that asked or was cut."""
    text: str
    """The question, or the reason for which a task waits for a decision."""
    since: str | None
    """The start of the attempt that asked."""
    asks: OpenQuestion | None
    """The question; None if the process of the task died, and a person decides."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return {
            "run_id": self.run_id,
            "run_name": self.run_name,
            "task_id": self.task_id,
            "attempt": self.attempt,
            "question": self.text,
            "since": self.since,
            "asks": None if self.asks is None else asks_as_json(self.asks),
        }


async def list_questions(store: Store) -> list[WaitingTask]:
    """Return the tasks that wait for a person, those of the newest run first. Answered questions are left out, also if
    no process has read the answer yet. Raises StoreError if the store cannot list its runs.
    """
    found: list[WaitingTask] = []
    for run in await store.list_runs(MOST_SEARCHED):
        if run.counts.get(TaskStatus.WAITING_INPUT, 0) and RunStatus(run.status) not in RUN_DONE:
            found += await _of_run(store, run)
    return found


async def _of_run(store: Store, record: RunRecord) -> list[WaitingTask]:
    try:
        return await waiting_tasks(await stored_run(store, record.run_id))
    except PlaitError:  # a damaged run, or a run that was deleted just now: the others are found
        return []


async def waiting_tasks(run: StoredRun) -> list[WaitingTask]:
    """Return the tasks of the run that wait for a person, in the order of the DAG, except those whose answer is stored
    already. Raises StoreError.
    """
    noted = await first_notes(run)
    asked = {one.task_id: one for one in open_questions(run) if one.task_id not in noted}
    return [
        WaitingTask(
            run.record.run_id,
            run.record.name,
            task.task_id,
            task.attempt,
            task.question or "",
            task.started_at,
            asked.get(task.task_id),
        )
        for task in run.tasks
        if _waits(task) and (task.asked is None or task.task_id in asked)
    ]


def _waits(task: TaskRecord) -> bool:
    return TaskStatus(task.status) is TaskStatus.WAITING_INPUT
