"""Tasks that a reply adds to a run, in the shape of a plan file's tasks."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from runner.errors import DAGError, Problem
from runner.plan.for_each import Member
from runner.plan.graph import make_task
from runner.plan.model import DefaultsPart, TaskPart
from runner.task import Task


def tasks_of(specs: Sequence[object]) -> list[Task]:
    """The tasks that `specs` describe. Raises DAGError with everything that is wrong with their shape."""
    tasks: list[Task] = []
    problems: list[Problem] = []
    for place, spec in enumerate(specs):
        try:
            tasks.append(_task(TaskPart.model_validate(spec)))
        except ValidationError as error:
            problems += [_problem(place, spec, found) for found in error.errors(include_url=False)[:5]]
    if problems:
        raise DAGError(problems)
    return tasks


def _task(part: TaskPart) -> Task:
    itself = Member(part.id, tuple(part.depends_on), part.continues, {}, None, first=True, for_each=part.for_each)
    return make_task(part, itself, DefaultsPart())


def _problem(place: int, spec: object, found: object) -> Problem:
    assert isinstance(found, dict)
    where = ".".join(map(str, found["loc"])) or "task"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    task_id = spec.get("id") if isinstance(spec, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    named = task_id if isinstance(task_id, str) else None
    return Problem(f"task {place + 1}, {where}: {found['msg']}", named, None, None, place)
