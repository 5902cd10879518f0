"""The store contract: runs made like an earlier run read as runs of their own, although the earlier run changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plait.events import AttemptId, TaskCompleted, TaskFailed, TaskReopened, TasksAdded, TaskStarted
from plait.persistence.contract.opened import OpenedStore
from plait.persistence.contract.samples import CREATED, OPENING, RUN, Writer, at, whole
from plait.persistence.sqlite_store import MemoryStore

if TYPE_CHECKING:
    from plait.events import Event
    from plait.persistence import Store

START = TaskStarted(at(3), "a", 1, "fast")
DONE = TaskCompleted(at(4), "a", 1, "The Moon.", '{"moon": true}', turn="First.")
TAKEN = replace(DONE, at=at(6), taken_from=AttemptId(RUN, "a", 1))
FAILED_B = (TaskStarted(at(3), "b", 1, "fast"), TaskFailed(at(4), "b", 1, "auth", "no key"))
LIKE = (replace(CREATED, like=RUN), *OPENING[1:], START, TAKEN)
SECOND, THIRD = "run-2", "run-3"


async def _reads_alone(store: Store, run_id: str, *changes: Event) -> None:
    """Assert that the run reads as in a store that has no other run."""
    alone = MemoryStore()
    await Writer(alone, run_id).write(*changes)
    assert await whole(store, run_id) == await whole(alone, run_id)


class CopiesContract(OpenedStore):
    """Texts taken from an earlier run are read like texts of the run itself."""

    async def test_a_run_like_another_reads_as_a_run_of_its_own(self, store: Store, writer: Writer) -> None:
        await writer.write(START, DONE)
        await Writer(store, SECOND).write(*LIKE)
        of_second = replace(TAKEN, taken_from=AttemptId(SECOND, "a", 1))
        third = (replace(CREATED, like=SECOND), *OPENING[1:], START, of_second)
        await Writer(store, THIRD).write(*third)
        await _reads_alone(store, RUN, *OPENING, START, DONE)
        await _reads_alone(store, SECOND, *LIKE)
        await _reads_alone(store, THIRD, *third)

    async def test_a_difference_from_the_earlier_run_is_stored(self, store: Store, writer: Writer) -> None:
        await writer.write(START, DONE)
        tasks = (replace(CREATED.tasks[0], prompt="Changed."), *CREATED.tasks[1:])
        others = (
            replace(TAKEN, text="The Sun."),
            replace(TAKEN, data_json=None),
            replace(TAKEN, turn="Changed."),
            replace(TAKEN, turn=()),
            replace(TAKEN, taken_from=AttemptId(RUN, "a", 2)),
            replace(TAKEN, taken_from=AttemptId("no such run", "a", 1)),
        )
        for number, other in enumerate(others):
            run_id = f"other-{number}"
            changes = (replace(CREATED, like=RUN, tasks=tasks), *OPENING[1:], START, other)
            await Writer(store, run_id).write(*changes)
            await _reads_alone(store, run_id, *changes)
        await Writer(store, SECOND).write(replace(CREATED, like="no such run"))
        await _reads_alone(store, SECOND, CREATED)

    async def test_added_tasks_may_be_those_of_the_earlier_run(self, store: Store, writer: Writer) -> None:
        added = TasksAdded(at(5), tuple(replace(task, task_id=f"{task.task_id}.1") for task in CREATED.tasks), "a")
        await writer.write(START, DONE, added)
        changes = (*LIKE, replace(added, like=RUN))
        await Writer(store, SECOND).write(*changes)
        await _reads_alone(store, SECOND, *changes)

    async def test_a_changed_prompt_concerns_one_run(self, store: Store, writer: Writer) -> None:
        reopened = TaskReopened(at(5), "b", 1, prompt="Say it better.")
        await writer.write(START, DONE, *FAILED_B)
        second, third = Writer(store, SECOND), Writer(store, THIRD)
        await second.write(*LIKE, *FAILED_B)
        await third.write(*LIKE)
        await writer.write(reopened)
        await _reads_alone(store, SECOND, *LIKE, *FAILED_B)
        await _reads_alone(store, THIRD, *LIKE)
        await second.write(reopened)
        await _reads_alone(store, SECOND, *LIKE, *FAILED_B, reopened)
        await _reads_alone(store, THIRD, *LIKE)
        await _reads_alone(store, RUN, *OPENING, START, DONE, *FAILED_B, reopened)

    async def test_a_result_that_is_deleted_as_damaged_is_deleted_in_one_run(
        self, store: Store, writer: Writer
    ) -> None:
        damaged = TaskReopened(at(7), "a", 1, damaged=True)
        await writer.write(START, DONE)
        second, third = Writer(store, SECOND), Writer(store, THIRD)
        await second.write(*LIKE)
        await third.write(*LIKE)
        await writer.write(damaged)
        await _reads_alone(store, SECOND, *LIKE)
        await _reads_alone(store, THIRD, *LIKE)
        await third.write(damaged)
        await second.write(damaged)
        await _reads_alone(store, SECOND, *LIKE, damaged)
        await _reads_alone(store, THIRD, *LIKE, damaged)
        await _reads_alone(store, RUN, *OPENING, START, DONE, damaged)
