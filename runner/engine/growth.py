"""The growth of a run: adding the tasks of a reply, a policy or a `for_each`, within the limits of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from plait import events
from plait.backends.backend_protocol import Backend, Reply
from plait.errors import DAGError, Problem
from plait.runner.domain.dag import nearest
from plait.runner.domain.task_checks import go_on_with_many, lists_gone_over, taken_from_parts
from plait.runner.engine.backend_checks import unfit_settings
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.run_state import RunState
from plait.safe_text import parse_json
from plait.statuses import TaskStatus
from plait.task import GrowthLimits, Task

if TYPE_CHECKING:
    from plait.runner.plan.added_tasks import AddedTasks


class Growth:
    """Adds tasks to one run.

    `task_backends` lists each task's backend by position, and is extended in place. `backends` are those of the runner.
    `default` is the backend of added tasks that name none.
    """

    def __init__(
        self,
        state: RunState,
        scheduler: Scheduler,
        task_backends: list[str],
        *,
        backends: Mapping[str, Backend],
        default: str,
        limits: GrowthLimits,
        stamp: Callable[[], str],
    ) -> None:
        self._state = state
        self._scheduler = scheduler
        self._task_backends = task_backends
        self._backends = backends
        self._default = default
        self._limits = limits
        self._stamp = stamp

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
        new = lists_gone_over(tasks)
        there = {str(task.id).rpartition(".")[0] for task in tasks} - {added_by}
        yield from taken_from_parts(tasks, new | lists_gone_over(dag[name] for name in there if name in dag))
        before = {task.continues for task in tasks if task.continues is not None and task.continues in dag}
        lists = new | lists_gone_over(dag[name] for name in before)
        yield from go_on_with_many(tasks, lists)
        for taken in taken_from_parts(dag.tasks, new):
            name = str(taken.task_id).rpartition(".")[0]
            yield Problem(
                f"for_each needs ids for its parts, and the run has a task {taken.task_id!r}", name, "for_each"
            )

    def _unknown_backends(self, tasks: Sequence[Task]) -> Iterator[Problem]:
        for place, task in enumerate(tasks):
            if task.backend is not None and task.backend not in self._backends:
                yield self._unknown_backend(task.backend, task, place)

    def _unknown_backend(self, name: str, task: Task, place: int) -> Problem:
        known = ", ".join(sorted(self._backends))
        message = f"no backend named {name!r}; there are: {known}{nearest(name, self._backends)}"
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
    from plait.runner.plan.added_tasks import read_added  # noqa: PLC0415 - imports pydantic, needed by growing runs only

    return read_added(specs)
