"""What the names in a task's prompt stand for: results of other tasks, inputs, its own item. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from plait.backends.protocol import JsonInput, JsonValue
from plait.runner.domain.dag import DAG
from plait.runner.domain.result import TaskResult
from plait.runner.domain.status import TaskStatus
from plait.runner.domain.task import Task
from plait.runner.prompts.render import names_used, render


def named(task: Task) -> set[str]:
    """The names of tasks that the task's prompt uses or its aliases stand for; also other names."""
    used = names_used(task.prompt)
    aliased = chain.from_iterable((names,) if isinstance(names, str) else names for names in task.aliases.values())
    return {*((used.names | used.results) - task.aliases.keys()), *aliased}


def rendered(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> str:
    """The prompt of `task`, with the results of tasks that are done, by position. Raises PromptError."""
    if "{" not in task.prompt:
        return task.prompt
    upstream = _Upstream(task, dag, results)
    used = names_used(task.prompt)
    values: dict[str, JsonInput] = {name: upstream.value(name) for name in used.names}
    if "results" in values:
        names = sorted({*task.upstream, *used.results} - task.aliases.keys(), key=dag.position)
        values["results"] = {name: upstream.value(name) for name in [*names, *task.aliases]}
    return render(task.prompt, values)


class _Upstream:
    def __init__(self, task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> None:
        self._task = task
        self._dag = dag
        self._results = results

    def value(self, name: str) -> JsonInput:
        """What `name` stands for. The DAG was checked, so it stands for something."""
        task, inputs = self._task, self._dag.inputs
        if name in task.aliases:
            alias = task.aliases[name]
            return self._result(alias) if isinstance(alias, str) else [self._result(task_id) for task_id in alias]
        if name == "item":
            return task.item
        if name == "inputs":
            return dict(inputs)
        if name in inputs:
            return inputs[name]
        return None if name == "results" else self._result(name)

    def _result(self, task_id: str) -> JsonValue:
        """A task's value; the empty text when it was skipped or failed softly."""
        result = self._results.get(self._dag.position(task_id))
        return "" if result is None or result.status is not TaskStatus.COMPLETED else result.value
