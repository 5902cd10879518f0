"""Tasks added to a run by a reply, in the shape of a plan file's tasks.

The tasks are written by a model, so their prompts are plain: names and fields without a template
language. Nothing else checks the prompts: a plain prompt is recognised by its text alone, wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

from pydantic import ValidationError

from plait.errors import DAGError, Problem
from plait.json_form import JsonValue
from plait.runner.plan.for_each import Member
from plait.runner.plan.plan_file import salvage
from plait.runner.plan.plan_mistakes import findings
from plait.runner.plan.plan_models import DefaultsPart, PlanPart, TaskPart
from plait.runner.plan.plan_tasks import make_task
from plait.runner.prompts.prompt_template import check_plain
from plait.task import NO_PROMPT, Task, lacks_prompt

_LONGEST_NAME = 64
_REFUSED = {
    "when": "an added task has no condition; leave `when` out, and add the task only if it is to run",
    "files": "an added task has no files; leave `files` out, and insert results of other tasks",
    "model": "an added task has the model of its backend; leave `model` out, and choose among the backends of the run",
}
"""Fields of a task that a model must not choose, with the message."""


@dataclass(frozen=True, slots=True)
class AddedTasks:
    """The tasks of a reply."""

    tasks: Sequence[Task]
    """The tasks. With `mistakes`, approximations good enough to find further mistakes."""
    mistakes: Sequence[Problem] = ()
    """The problems of the tasks' shape."""
    lost: Collection[int] = ()
    """Positions of the tasks with unreadable dependencies."""
    names: Sequence[str | None] = ()
    """The id of each task as written in the reply; None if unusable."""

    def all_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the mistakes followed by the further `problems` of the tasks, with the names used in the reply.

        Problems that only result from the mistakes are left out.
        """
        if not self.mistakes:
            return list(problems)
        further = problems[len(self.mistakes) :]
        kept = (one for one in further if one.position not in self.lost or "not upstream" not in one.message)
        return [*self.mistakes, *(one if one.position is None else self._named(one, one.position) for one in kept)]

    def _named(self, problem: Problem, position: int) -> Problem:
        return replace(_at(position, self.names, problem.message), field=problem.field, index=problem.index)


def read_added(specs: Sequence[object]) -> AddedTasks:
    """Return the tasks described by `specs`, with all problems of their shape."""
    whole = cast("JsonValue", {"tasks": list(specs)})
    names = [_name(spec) for spec in specs]
    found: list[Problem] = []
    lost: set[int] = set()
    try:
        part: PlanPart | None = PlanPart.model_validate(whole)
    except ValidationError as error:
        found = [_mistake(path, message, names) for path, message, _ in findings(error, whole)]
        part, lost = salvage(whole, error)
    parts = [] if part is None else part.tasks
    for place, one in enumerate(parts):
        if lacks_prompt(one.prompt, one.backend):
            found.append(replace(_at(place, names, NO_PROMPT), field="prompt"))
            one.prompt = "?"
    tasks = list(map(_task, parts))
    for place, task in enumerate(tasks):
        if mistake := check_plain(task.prompt):
            found.append(replace(_at(place, names, str(mistake)), field="prompt", line=mistake.line))
            tasks[place] = replace(task, prompt="?")
        for field, message in _REFUSED.items():
            if getattr(parts[place], field) not in (None, []):
                found.append(replace(_at(place, names, message), field=field))
                tasks[place] = replace(tasks[place], when=None, model=None)
    return AddedTasks(tasks, found, lost, names)


def tasks_of(specs: Sequence[object]) -> Sequence[Task]:
    """Return the tasks described by `specs`. Raises DAGError with all problems of their shape."""
    added = read_added(specs)
    if added.mistakes:
        raise DAGError(added.mistakes)
    return added.tasks


def _task(part: TaskPart) -> Task:
    itself = Member(part.id, tuple(part.depends_on), part.continues, {}, None, first=True, for_each=part.for_each)
    return make_task(part, itself, DefaultsPart())


def _name(spec: object) -> str | None:
    task_id: object = spec.get("id") if isinstance(spec, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return task_id if isinstance(task_id, str) and 0 < len(task_id) <= _LONGEST_NAME else None


def _mistake(path: Sequence[str | int], message: str, names: Sequence[str | None]) -> Problem:
    _tasks, place, *field = path
    where = ".".join(map(str, field))
    # Messages about missing or unknown keys contain the key.
    said = message if not where or repr(field[-1]) in message else f"{where} {message}"
    return _at(int(place), names, said)


def _at(place: int, names: Sequence[str | None], message: str) -> Problem:
    name = names[place]
    return Problem(message if name is not None else f"task {place + 1}: {message}", name, None, None, place)
