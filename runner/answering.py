"""A person settles a task that waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backends.errors import BackendError
from backends.protocol import Message
from backends.structured import Mismatch, Schema
from backends.text import clean_text
from persistence.changes import Change, RunReleased, TaskAnswered, TaskCompleted, TaskFailed, TaskWaiting
from persistence.records import TaskRecord
from runner.clock import iso
from runner.dag import nearest
from runner.drive import Config
from runner.errors import PlaitError
from runner.feed import Feed
from runner.owner import forget
from runner.ownership import StoredRun, claim, wait_until_free
from runner.status import TaskStatus
from runner.task import FailureMode, Task
from runner.translate import to_json, turns
from runner.verdict import Action, judge

GIVEN_UP = "given_up"
"""The error kind of a task that a person declared failed."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a person says of a task: see `ParallelRunner.answer`."""

    how: Literal["done", "again", "fail"]
    text: str = ""


async def settle(config: Config, run: StoredRun, task_id: str, settlement: Settlement) -> None:
    """See `ParallelRunner.answer`. The run is claimed, settled and left in one transaction."""
    dag, run_id = run.state.dag, run.record.run_id
    if task_id not in dag:
        raise PlaitError(f"run {run_id} has no task {task_id!r}{nearest(task_id, (task.id for task in dag))}")
    await wait_until_free(config, run, Feed())
    position = dag.position(task_id)
    record, verdict = run.tasks[position], judge(dag, run.tasks)[position]
    if verdict.action is not Action.ASK:
        raise PlaitError(f"task {task_id!r} of run {run_id} is {record.status} and waits for nobody's answer")
    at = iso(config.clock.wall())
    then: list[Change] = []
    if TaskStatus(record.status) is not TaskStatus.WAITING_INPUT:  # its process died, and nobody has resumed the run
        then.append(TaskWaiting(at, task_id, record.attempt, verdict.reason, crashed=True))
    then += _outcome(run, dag[task_id], record, settlement, at)
    owner, _ = await claim(config, run.store, run.record, [*then, RunReleased(at)])
    forget(owner)


def _outcome(run: StoredRun, task: Task, record: TaskRecord, settlement: Settlement, at: str) -> Sequence[Change]:
    text = clean_text(settlement.text)
    if settlement.how == "again":
        return [TaskAnswered(at, task.id)]
    if settlement.how == "fail":
        status = TaskStatus.SKIPPED if task.failure_mode is FailureMode.SKIP else TaskStatus.FAILED
        return [TaskFailed(at, task.id, record.attempt, status.value, GIVEN_UP, text or "a person said that it failed")]
    data = None if task.output_schema is None else _data(task, text)
    position = run.state.dag.position(task.id)
    said = [Message("assistant", text)]
    if not any(run.tasks[n].damaged for n in run.state.dag.dependencies[position]):  # else nobody knows what was asked
        said.insert(0, Message("user", clean_text(run.state.prompt(task))))
    return [*turns(at, task.id, record.attempt, said), TaskCompleted(at, task.id, record.attempt, text, data)]


def _data(task: Task, text: str) -> str:
    try:
        return to_json(Schema(task.output_schema or {}).read(text))
    except (Mismatch, BackendError) as error:
        raise PlaitError(f"the answer does not fit the output_schema of task {task.id!r}: {error}") from None
