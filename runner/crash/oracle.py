"""What a run has to come to, computed straight from the DAG: no scheduler, no store, no state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backends.errors import ErrorKind
from runner.crash.case import Case, answer, digest, tries
from runner.status import RunStatus, TaskStatus
from runner.task import FailureMode, Task


@dataclass(frozen=True, slots=True)
class Expected:
    """How a task ends, with how many executions when nothing is killed. `turn` is what its conversation gains."""

    status: TaskStatus
    executions: int
    result: str = ""
    value: str = ""
    history: tuple[str, ...] = ()


def expected(case: Case) -> dict[str, Expected]:
    """Every task's end."""
    known: dict[str, Expected] = {}
    for position in case.dag.order:
        task = case.dag.tasks[position]
        known[task.id] = _end(case, task, known)
    return known


def run_status(ends: Mapping[str, Expected]) -> RunStatus:
    """A run has failed if a task has; one that was skipped does it no harm."""
    failed = any(end.status is TaskStatus.FAILED for end in ends.values())
    return RunStatus.FAILED if failed else RunStatus.COMPLETED


def passes(task: Task, status: TaskStatus) -> bool:
    """Whether what waits for `task` may start after it ended so."""
    soft = status is TaskStatus.FAILED and task.failure_mode is FailureMode.SOFT
    return soft or status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED}


def _end(case: Case, task: Task, known: Mapping[str, Expected]) -> Expected:
    if not all(passes(case.dag[name], known[name].status) for name in task.upstream):
        return Expected(TaskStatus.PENDING, 0)
    part = case.parts[task.id]
    most = tries(task, ErrorKind.REFUSED if part.refused else ErrorKind.TRANSIENT)
    if part.crashes:
        most = task.retry.max_crashes
    if part.crashes or part.refused or part.failures >= most:
        skipped = task.failure_mode is FailureMode.SKIP
        return Expected(TaskStatus.SKIPPED if skipped else TaskStatus.FAILED, most)
    prompt = "|".join([task.id, *(known[name].value for name in dict.fromkeys(task.upstream))])
    past = known[task.continues].history if task.continues is not None else ()
    text, data = answer(task.id, prompt, past, part)
    value = str(data["mark"]) if isinstance(data, dict) else text
    return Expected(TaskStatus.COMPLETED, part.failures + 1, digest(text, data), value, (*past, prompt, text))
