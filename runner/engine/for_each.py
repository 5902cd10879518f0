"""`ForEachExpander`: a task with `for_each` becomes one part for each element of a list, and gathers the results.

The parts of the task `t` are `t.1`, `t.2`, ... in the order of the list. Tasks with the same `for_each` are partners: a
part refers to its partner's part for the same element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait import events
from plait.errors import DAGError, Problem
from plait.json_form import JsonValue
from plait.runner.domain.prompt_values import named
from plait.runner.domain.run_result import TaskResult
from plait.runner.engine.growth import Growth
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.run_state import RunState
from plait.statuses import TaskStatus
from plait.task import Task


class ForEachExpander:
    """Expands and gathers the tasks with `for_each` of one run."""

    def __init__(self, state: RunState, scheduler: Scheduler, growth: Growth) -> None:
        self._state = state
        self._scheduler = scheduler
        self._growth = growth

    def expand(self, position: int) -> list[events.Event]:
        """Add the parts of the task with `for_each` at `position`, and return the events. Raises DAGError."""
        dag = self._state.dag
        task = dag.tasks[position]
        elements = _elements(task, self._state.results.get(dag.position(task.for_each or "")))
        partners = self._partners(task, elements)
        parts = [_part(task, partners, number, item) for number, item in enumerate(elements, 1)]
        new_events: list[events.Event] = []
        if parts:
            new_events.append(self._growth.add(parts, task.id, gathered_by=position))
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


def _elements(task: Task, result: TaskResult | None) -> Sequence[JsonValue]:
    """Return the list over which the task is expanded. Raises DAGError if the result holds no such list."""
    if result is None or result.status is not TaskStatus.COMPLETED:
        return []  # skipped, or failed softly: no elements
    found = result.data
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else None
    if not isinstance(found, list):
        message = (
            f"for_each needs a list, or a mapping with one list in it, as the result of task {task.for_each!r}; "
            f"give {task.for_each!r} an output_schema for a list"
        )
        raise DAGError([Problem(message, task.id)])
    for number, element in enumerate(found, 1):
        if element is None:
            raise DAGError([Problem(f"element {number} of {task.for_each!r} is null", task.id)])
    return found


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
