"""Values for the names in a task's prompt: results of other tasks, inputs, the item of a `for_each` part. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from plait.json_form import JsonInput
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import TaskResult
from plait.runner.prompts.prompt_names import NoResult, PromptNames, structured
from plait.runner.prompts.prompt_template import condition_names, is_true, names_used, render
from plait.statuses import TaskStatus
from plait.task import Task


def named(task: Task) -> set[str]:
    """Return the task names used in the prompt or the condition, or listed in the aliases, of `task`. The set may
    contain other names too.
    """
    used = [names_used(task.prompt), *(() if task.when is None else (condition_names(task.when)[0],))]
    aliased = chain.from_iterable((names,) if isinstance(names, str) else names for names in task.aliases.values())
    return {*(frozenset().union(*(one.names | one.results for one in used)) - task.aliases.keys()), *aliased}


def rendered(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> str:
    """Return the rendered prompt of `task`. `results` maps positions to the results of done tasks. Raises
    PromptError.
    """
    if "{" not in task.prompt:
        return task.prompt
    return render(task.prompt, prompt_values(task, dag, results))


def prompt_values(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> dict[str, JsonInput]:
    """Return the value of each name in the prompt of `task`. `results` maps positions to the results of done tasks."""
    upstream = _Upstream(task, dag, results, has_data="data" in task.prompt)
    return upstream.values(names_used(task.prompt))


def is_wanted(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> bool:
    """Return whether the condition of `task`, if any, is true. `results` as in `rendered`. Raises PromptError."""
    if task.when is None:
        return True
    upstream = _Upstream(task, dag, results, has_data="data" in task.when)
    return is_true(task.when, upstream.values(condition_names(task.when)[0]))


class _Upstream:
    def __init__(self, task: Task, dag: DAG, results: Mapping[int, TaskResult], *, has_data: bool) -> None:
        self._task = task
        self._dag = dag
        self._results = results
        self._has_data = has_data
        """True if the template may name the field `data` of a result."""

    def values(self, used: PromptNames) -> dict[str, JsonInput]:
        """Return the values of the names in `used`."""
        values: dict[str, JsonInput] = {name: self.value(name) for name in used.names}
        if "results" in values:
            task = self._task
            names = sorted({*task.upstream, *used.results} - task.aliases.keys(), key=self._dag.position)
            values["results"] = {name: self.value(name) for name in [*names, *task.aliases]}
        return values

    def value(self, name: str) -> JsonInput:
        """Return the value of `name`. The DAG is validated, so every name has a value."""
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

    def _result(self, task_id: str) -> JsonInput:
        """Return the value of a task; `NoResult` if the task was skipped or failed softly."""
        result = self._results.get(self._dag.position(task_id))
        if result is None or result.status is not TaskStatus.COMPLETED:
            return NoResult()
        return structured(result.value) if self._has_data else result.value
