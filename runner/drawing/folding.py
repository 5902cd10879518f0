"""A large DAG with the parts of each `for_each` as one task, so that the picture stays readable. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from plait.errors import DAGError
from plait.runner.domain.dag import DAG
from plait.runner.domain.groups import group_of, groups_of
from plait.runner.drawing.dag_picture import Look
from plait.statuses import TaskStatus
from plait.task import Task

MOST_DRAWN = 200
"""Tasks from which on groups are folded."""
_FEWEST = 2
_URGENT = (TaskStatus.FAILED, TaskStatus.WAITING_INPUT, TaskStatus.RUNNING)


def fold(dag: DAG, looks: Mapping[str, Look]) -> tuple[DAG, Mapping[str, Look]]:
    """Return `dag` and `looks` with each group of parts, and the whole of the group if there is one, as one task. A DAG
    of at most `MOST_DRAWN` tasks is returned unchanged.
    """
    if len(dag) <= MOST_DRAWN:
        return dag, looks
    groups = groups_of(((task.id, task.item, task.id) for task in dag), _FEWEST)
    name_of = {task.id: _name(task, groups) for task in dag}
    merged: dict[str, Task] = {}
    needs: dict[str, dict[str, None]] = {}
    for position, task in enumerate(dag):
        name = name_of[task.id]
        merged.setdefault(name, Task(name, name, continues=name_of.get(task.continues or "")))
        before = needs.setdefault(name, {})
        before.update(dict.fromkeys(name_of[dag.tasks[one].id] for one in dag.dependencies[position]))
        before.pop(name, None)
    tasks = [Task(name, name, tuple(needs[name]), continues=task.continues) for name, task in merged.items()]
    try:
        smaller = DAG(tasks, name=dag.name)
    except DAGError:  # parts of two groups need each other
        return dag, looks
    kept = {name: look for name, look in looks.items() if name in merged and name not in groups}
    return smaller, {**kept, **{name: _look(parts, looks) for name, parts in groups.items()}}


def _name(task: Task, groups: Mapping[str, Sequence[str]]) -> str:
    name = group_of(task.id, task.item)
    return task.id if name is None or name not in groups else name


def _look(parts: Sequence[str], looks: Mapping[str, Look]) -> Look:
    counts = Counter(looks[part].status for part in parts if part in looks)
    there = [status for status in (*_URGENT, *TaskStatus) if counts[status]]
    told = ", ".join(f"{counts[one]:,} {one.value.replace('_', ' ')}" for one in TaskStatus if counts[one])
    note = " · ".join(filter(None, (f"{len(parts):,} parts", told)))
    return Look(there[0] if there else None, note, note)
