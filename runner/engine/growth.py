"""The growth of a run: adding the tasks of a reply, a policy or a `for_each`, within the limits of the run.

The parts of a task `t` with `for_each` are `t.1`, `t.2`, ... in the order of the list. Tasks with the same `for_each`
are partners: a part refers to its partner's part for the same element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait import events
from plait.backends.backend_protocol import Reply
from plait.errors import DAGError, Problem
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest
from plait.runner.domain.prompt_values import named
from plait.runner.domain.run_result import TaskResult
from plait.runner.domain.task_checks import for_each_targets, part_id_clashes, unpaired_continues
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import unfit_settings
from plait.safe_text import parse_json
from plait.statuses import TaskStatus
from plait.task import Task

if TYPE_CHECKING:
    from plait.runner.plan.plan_tasks import AddedTasks


class Growth:
    """Adds tasks to one run, and their backends to `LiveRun.task_backends`."""

    def __init__(self, run: LiveRun) -> None:
        self._state = run.state
        self._scheduler = run.scheduler
        self._task_backends = run.task_backends
        self._backends = run.options.backends
        self._default = run.options.default
        self._limits = run.options.growth.within(run.state.dag.growth)
        self._stamp = run.stamp

    def from_reply(self, task: Task, reply: Reply) -> list[events.Event]:
        """Add the tasks in the reply of `task`, which is about to complete. Return the events.

        Adds nothing if `task` has added tasks before: an earlier attempt added the tasks, but the result was lost.
        Raises DAGError if the tasks are invalid.
        """
        if self._state.has_added(self._state.dag.position(task.id)):
            return []
        specs: list[object] = list(reply.tasks)
        if task.adds_tasks:
            specs += _specs(reply)
        if not specs:
            return []
        added = _read_added(specs)
        try:
            return [self.add(added.tasks, task.id, added.mistakes)]
        except DAGError as error:
            raise DAGError(added.all_problems(error.problems)) from None

    def add(
        self,
        tasks: Sequence[Task],
        added_by: str | None,
        mistakes: Sequence[Problem] = (),
        gathered_by: int | None = None,
    ) -> events.TasksAdded:
        """Add all `tasks` and return the event. With `gathered_by`, `tasks` are the parts of the task at that position.

        Raises DAGError and adds nothing if any task is invalid. The error lists every problem, beginning with
        `mistakes`, the problems already found.
        """
        too_many = self._limit_problems(tasks, added_by)
        problems = [*mistakes, *too_many, *self._cancelled_problems(tasks), *self._unknown_backends(tasks)]
        problems += self._parts_problems(tasks, added_by)
        problems += _new_files(tasks)
        start, names, added = len(self._state.dag), list[str](), None
        if not too_many:
            try:
                added = self._state.add_tasks(tasks, added_by, self._stamp())
                names = self._backends_of(tasks)
            except DAGError as error:
                problems += error.problems
        if added is None or problems:
            self._state.withdraw_tasks(start)
            raise DAGError(problems)
        self._task_backends += names
        if gathered_by is not None:
            self._state.expand(gathered_by)
        self._scheduler.extend(self._task_backends[start:], self._state.statuses)
        return added

    def _limit_problems(self, tasks: Sequence[Task], added_by: str | None) -> list[Problem]:
        problems: list[Problem] = []
        total = len(self._state.dag) + len(tasks)
        if total > self._limits.max_tasks:
            message = f"{len(tasks)} more tasks would make {total}, and max_tasks is {self._limits.max_tasks}"
            problems.append(Problem(f"{message}; raise max_tasks, or add fewer tasks", None, "tasks"))
        depth = 0 if added_by is None else self._state.depths.get(self._state.dag.position(added_by), 0) + 1
        if depth > self._limits.max_depth:
            message = f"these tasks would be at depth {depth}, and max_depth is {self._limits.max_depth}"
            problems.append(Problem(f"{message}; raise max_depth, or add no tasks here", None, "tasks"))
        return problems

    def _cancelled_problems(self, tasks: Sequence[Task]) -> Iterator[Problem]:
        """Report dependencies on cancelled tasks: a task that waits for a cancelled task would silently never run."""
        dag, statuses = self._state.dag, self._state.statuses
        for place, task in enumerate(tasks):
            for name in task.upstream:
                if name in dag and statuses[dag.position(name)] is TaskStatus.CANCELLED:
                    message = f"depends on {name!r}, which was cancelled; leave it out"
                    yield Problem(message, task.id, "depends_on", None, place)

    def _parts_problems(self, tasks: Sequence[Task], added_by: str | None) -> Iterator[Problem]:
        """Report ids that collide with generated part ids (`<id>.<n>`), in either direction, and tasks that continue a
        `for_each` task without being paired with the task.
        """
        dag = self._state.dag
        new = for_each_targets(tasks)
        there = {str(task.id).rpartition(".")[0] for task in tasks} - {added_by}
        yield from part_id_clashes(tasks, new | for_each_targets(dag[name] for name in there if name in dag))
        before = {task.continues for task in tasks if task.continues is not None and task.continues in dag}
        lists = new | for_each_targets(dag[name] for name in before)
        yield from unpaired_continues(tasks, lists)
        for taken in part_id_clashes(dag.tasks, new):
            name = str(taken.task_id).rpartition(".")[0]
            yield Problem(
                f"for_each needs ids for its parts, and the run has a task {taken.task_id!r}", name, "for_each"
            )

    def _unknown_backends(self, tasks: Sequence[Task]) -> Iterator[Problem]:
        for place, task in enumerate(tasks):
            if task.backend is not None and task.backend not in self._backends:
                yield self._unknown_backend(task.backend, task, place)

    def _unknown_backend(self, name: str, task: Task, place: int) -> Problem:
        names = ", ".join(sorted(self._backends))
        message = f"no backend named {name!r}; there are: {names}{nearest(name, self._backends)}"
        return Problem(message, task.id, "backend", None, place)

    def _backends_of(self, tasks: Sequence[Task]) -> list[str]:
        problems: list[Problem] = []
        names: list[str] = []
        dag, start = self._state.dag, len(self._task_backends)
        for place, task in enumerate(tasks):
            name = dag.backend_of(task) or self._default
            names.append(name)
            if task.backend is None and name not in self._backends:
                problems.append(self._unknown_backend(name, task, place))
            if name in self._backends:
                problems += unfit_settings(task, name, self._backends[name], place)
            if task.continues is None:
                continue
            before = dag.position(task.continues)
            theirs = (
                self._task_backends[before] if before < start else dag.backend_of(dag.tasks[before]) or self._default
            )
            if name != theirs:
                message = f"continues {task.continues!r}, which runs on backend {theirs!r}; leave its backend out"
                problems.append(Problem(message, task.id, "backend", None, place))
        if problems:
            raise DAGError(problems)
        return names

    def expand(self, position: int) -> list[events.Event]:
        """Add the parts of the task with `for_each` at `position`, and return the events. Raises DAGError."""
        dag = self._state.dag
        task = dag.tasks[position]
        elements = _elements(task, self._state.results.get(dag.position(task.for_each or "")))
        partners = self._partners(task, elements)
        parts = [_part(task, partners, number, item) for number, item in enumerate(elements, 1)]
        new_events: list[events.Event] = []
        if parts:
            new_events.append(self.add(parts, task.id, gathered_by=position))
        else:
            self._state.expand(position)
        self._scheduler.join(position, len(parts))
        return new_events

    def _partners(self, task: Task, elements: Sequence[JsonValue]) -> dict[str, bool]:
        """Return the tasks with the same `for_each` that `task` depends on or names, each with True if the task has
        parts to pair up with. Raises DAGError if such a task was expanded over another list.
        """
        dag = self._state.dag
        names = sorted(named(task).union(task.upstream))
        mine = [name for name in names if name in dag and dag[name].for_each == task.for_each]
        return {name: self._has_parts_for(name, task, elements) for name in mine}

    def _has_parts_for(self, name: str, task: Task, elements: Sequence[JsonValue]) -> bool:
        position = self._state.dag.position(name)
        parts = self._state.parts.get(position)
        if parts is None and self._state.statuses[position] is not TaskStatus.COMPLETED:
            return False  # failed or skipped as a whole
        if [self._state.dag.tasks[part].item for part in parts or ()] != list(elements):
            message = (
                f"continues the parts of {name!r}, which were made from another list: the result of {task.for_each!r} "
                f"has changed. Run these tasks in a new run"
            )
            raise DAGError([Problem(message, task.id)])
        return True

    def collect(self, position: int) -> JsonValue:
        """Return the results of the parts of the task at `position`, in order; "" for a part without a result."""
        results = [self._state.results[part] for part in self._state.parts[position]]
        return [result.value if result.status is TaskStatus.COMPLETED else "" for result in results]


def _new_files(tasks: Sequence[Task]) -> Iterator[Problem]:
    """Report files of added tasks: a run has the files that were there when the run was made."""
    for place, task in enumerate(tasks):
        if any(isinstance(file, str) for file in task.files):
            yield Problem("a task added during the run has no files; leave `files` out", task.id, "files", None, place)


def _specs(reply: Reply) -> Sequence[object]:
    """Return the tasks in the answer of a task with `adds_tasks`: a list, or a mapping with the key `tasks`. Raises
    DAGError if the answer is neither.
    """
    data = reply.data
    if data is None:
        try:
            data = parse_json(reply.text)
        except ValueError as error:
            raise DAGError([Problem(f"the answer is not JSON: {error}")]) from None
    if isinstance(data, dict) and isinstance(data.get("tasks"), list):
        data = data["tasks"]
    if not isinstance(data, list):
        raise DAGError([Problem("the answer has to be a list of tasks, or a mapping with the key 'tasks'")])
    return data


def _read_added(specs: Sequence[object]) -> AddedTasks:
    from plait.runner.plan.plan_tasks import read_added  # noqa: PLC0415 - imports pydantic, needed by growing runs only

    return read_added(specs)


def _elements(task: Task, result: TaskResult | None) -> Sequence[JsonValue]:
    """Return the list over which the task is expanded. Raises DAGError if the result holds no such list."""
    if result is None or result.status is not TaskStatus.COMPLETED:
        return []  # skipped, or failed softly: no elements
    elements = result.data
    if isinstance(elements, dict):
        lists = [value for value in elements.values() if isinstance(value, list)]
        elements = lists[0] if len(lists) == 1 else None
    if not isinstance(elements, list):
        message = (
            f"for_each needs a list, or a mapping with one list in it, as the result of task {task.for_each!r}; "
            f"give {task.for_each!r} an output_schema for a list"
        )
        raise DAGError([Problem(message, task.id)])
    for number, element in enumerate(elements, 1):
        if element is None:
            raise DAGError([Problem(f"element {number} of {task.for_each!r} is null", task.id)])
    return elements


def _part(task: Task, partners: Mapping[str, bool], number: int, item: JsonValue) -> Task:
    """Return the part for one element. A reference to a partner with parts becomes a reference to the partner's part
    for the same element. A partner without parts has no conversation to continue.
    """
    own = {name: f"{name}.{number}" for name, has_parts in partners.items() if has_parts}
    aliases = {
        alias: own.get(names, names) if isinstance(names, str) else [own.get(name, name) for name in names]
        for alias, names in task.aliases.items()
    }
    continues = None if partners.get(task.continues or "") is False else task.continues
    return replace(
        task,
        id=f"{task.id}.{number}",
        depends_on=tuple(own.get(name, name) for name in task.upstream if name != task.continues),
        continues=None if continues is None else own.get(continues, continues),
        item=item,
        aliases={**own, **aliases},
        for_each=None,
    )
