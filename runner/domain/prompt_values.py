"""Values for the names in a task's prompt: results of other tasks, inputs, the item of a `for_each` part. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias, cast

from plait.errors import nearest
from plait.json_form import JsonInput, as_json
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.run_result import TaskResult
from plait.runner.prompts.prompt_names import NoResult, PromptNames, structured
from plait.runner.prompts.prompt_template import (
    ANSWER,
    check_texts,
    condition_names,
    evaluated,
    is_true,
    joined,
    named_texts,
    names_used,
    render,
)
from plait.statuses import TaskStatus
from plait.task import PREVIOUS, Task, Workspace, command_text


def names_of(task: Task) -> PromptNames:
    """Return the names used in the texts of `task`, without the condition, and its arguments. Raises PromptError."""
    if not task.run and task.check is None and task.call is None and not (task.arguments or task.cwd or task.env):
        return names_used(task.prompt)
    return joined([*(names_used(text) for text in task.texts), PromptNames(frozenset(task.arguments))])


def named(task: Task) -> set[str]:
    """Return the task names used in the texts or the condition, or listed in the aliases, of `task`. The
    set may contain other names too.
    """
    used = [names_of(task), *(names for _, _, names, _ in named_texts(task, task.check, task.call))]
    aliased = chain.from_iterable((names,) if isinstance(names, str) else names for names in task.aliases.values())
    return {*(frozenset().union(*(names.names | names.results for names in used)) - task.aliases.keys()), *aliased}


def rendered(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> str:
    """Return the rendered prompt of `task`, or its command as a message. `results` maps positions to the results of
    done tasks. Raises PromptError.
    """
    if task.run:
        values = prompt_values(task, dag, results)
        return command_text([render(word, values) for word in task.run], render(task.prompt, values), task.codes)
    if "{" not in task.prompt:
        return task.prompt
    return render(task.prompt, prompt_values(task, dag, results))


def check_words(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> list[str]:
    """Return the rendered words of the check of `task`; none without a check. `results` as in `rendered`. Raises
    PromptError.
    """
    if task.check is None:
        return []
    values = prompt_values(task, dag, results)
    return [render(word, values) for word in task.check.run]


def workspace(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> Workspace | None:
    """Return where the program of `task` works: by default where that of the task does which it continues; None for
    where its backend does. `results` as in `rendered`. Raises PromptError.
    """
    named_by = task
    while named_by.cwd is None and named_by.continues is not None:
        named_by = dag[named_by.continues]
    if (path := named_by.cwd) is None and not task.env:
        return None
    values = prompt_values(task, dag, results)
    place = Workspace(env={name: render(text, values) for name, text in task.env.items()})
    if path is None:
        return place
    if "{" not in path:
        return replace(place, cwd=path)
    written, slash, rest = path.partition("{")[0].rpartition("/")
    below = render(rest + path[len(written + slash + rest) :], prompt_values(named_by, dag, results))
    return replace(place, cwd=written or slash or ".", below=below)


def passes(task: Task, dag: DAG, results: Mapping[int, TaskResult], answer: JsonInput) -> bool:
    """Return whether the condition in the check of `task` is true of `answer`. `results` as in `rendered`. Raises
    PromptError.
    """
    condition = "true" if task.check is None else task.check.passes or "true"
    return is_true(condition, _check_values(task, dag, results, answer))


def judge_prompt(task: Task, dag: DAG, results: Mapping[int, TaskResult], answer: JsonInput) -> str:
    """Return the prompt for the judge of `answer`. `results` as in `rendered`. Raises PromptError."""
    prompt = "" if task.check is None else task.check.judge or ""
    return render(prompt, _check_values(task, dag, results, answer))


def _check_values(task: Task, dag: DAG, results: Mapping[int, TaskResult], answer: JsonInput) -> dict[str, JsonInput]:
    """Return the value of each name in the check of `task`, `answer` included."""
    texts = [] if task.check is None else list(check_texts(task.check))
    has_data = any("data" in text for text, _, _ in texts)
    upstream, values = _Upstream(task, dag, results, has_data=has_data), dict[str, JsonInput]()
    for _, names, _ in texts:
        values |= upstream.values(names)
    return {**values, ANSWER: structured(answer) if has_data else answer}


def check_key(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> list[JsonInput]:
    """Return what determines the check and the folder of `task`; nothing without them. `results` as in `rendered`.
    Raises PromptError.
    """
    place, check = workspace(task, dag, results), task.check
    if place is not None:
        return [as_json(place), *check_key(replace(task, cwd=None, env={}, continues=None), dag, results)]
    if check is None:
        return []
    values = _check_values(task, dag, results, None) if check.passes or check.judge else {}
    further = [check.output_schema, check.passes, check.judge, check.backend, values]
    return [*check_words(task, dag, results), *(cast("list[JsonInput]", further) if any(further) else [])]


def prompt_values(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> dict[str, JsonInput]:
    """Return the value of each name in the texts of `task`. `results` as in `rendered`."""
    upstream = _Upstream(task, dag, results, has_data=any("data" in text for text in task.texts))
    return upstream.values(names_of(task))


def is_wanted(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> bool:
    """Return whether the condition of `task`, if any, is true. `results` as in `rendered`. Raises PromptError."""
    if task.when is None:
        return True
    upstream = _Upstream(task, dag, results, has_data="data" in task.when)
    return is_true(task.when, upstream.values(condition_names(task.when)[0]))


Results: TypeAlias = Mapping[str, "str | Sequence[str]"]
"""The results of a called plan by name: the id of a task, or the ids of the tasks that `for_each` made."""


def call_inputs(task: Task, dag: DAG, results: Mapping[int, TaskResult], previous: Results) -> dict[str, JsonInput]:
    """Return the inputs of the plan that `task` calls. `previous` are the results of the round before; empty in the
    first. Raises PromptError.
    """
    assert task.call is not None
    upstream = _Upstream(task, dag, results, has_data=True)
    used, own = names_of(task), {PREVIOUS} if task.call.is_loop else set[str]()
    values = upstream.values(replace(used, names=used.names - own))
    if task.call.is_loop:
        values[PREVIOUS] = upstream.by_name(previous) or NoResult()
    inputs = {name: evaluated(value, values) for name, value in task.call.values.items()}
    return {**cast("Mapping[str, JsonInput]", task.call.plan.get("inputs", {})), **inputs}


def round_values(
    inputs: Mapping[str, JsonInput], names: Results, dag: DAG, results: Mapping[int, TaskResult]
) -> dict[str, JsonInput]:
    """Return the values of the names in `until` and `returns` of a called plan with these inputs and results."""
    by_name = _Upstream(Task("-", "-"), dag, results, has_data=True).by_name(names)
    return {**inputs, **by_name, "inputs": inputs, "results": by_name}


def argument_values(task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> dict[str, JsonInput]:
    """Return the value of each name in the arguments of `task`. `results` as in `rendered`."""
    upstream = _Upstream(task, dag, results, has_data=False)
    return {name: upstream.value(name) for name in task.arguments}


def parameter_name(name: str) -> str:
    """Return the name of a function's parameter for the value of `name`: `my-task` is `my_task`."""
    return name if name.isidentifier() else re.sub(r"\W", "_", name)


def with_arguments(
    task: Task, parameters: Sequence[tuple[str, bool]], inputs: Iterable[str], tasks: Mapping[str, str]
) -> Task:
    """Return the task with the names whose values the `parameters` of its function receive: see `Abilities`. `inputs`
    are the names of the run's inputs, `tasks` the ids of its tasks by `parameter_name`.

    The parameter `prompt`, else the first one if it names nothing, receives the prompt. Any other one that names
    nothing and has no default is an argument too, which the checks of the graph report.
    """
    names = {parameter_name(name): name for name in (*(task.inputs or inputs), *task.upstream, *task.aliases)}
    if task.item is not None or task.for_each is not None:
        names["item"] = "item"
    takes_prompt = any(parameter == "prompt" for parameter, _ in parameters)
    own = {task.id, group_of(task.id, task.item)}
    arguments: list[str] = []
    for place, (parameter, is_required) in enumerate(parameters):
        name = names.get(parameter)
        if name is None and is_required and tasks.get(parameter) not in own:
            name = tasks.get(parameter)
        if parameter == "prompt" or (name is None and not is_required):
            continue
        if name is None and place == 0 and not takes_prompt:
            if task.prompt.strip():
                continue
            if parameter != "item" and not nearest(parameter, [*names, *tasks]):  # no mistake: the empty prompt
                continue
        arguments.append(name or parameter)
    return task if tuple(arguments) == task.arguments else replace(task, arguments=tuple(arguments))


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

    def by_name(self, names: Results) -> dict[str, JsonInput]:
        """Return the results by their names."""
        return {
            name: self._result(ids) if isinstance(ids, str) else [self._result(task_id) for task_id in ids]
            for name, ids in names.items()
        }

    def value(self, name: str) -> JsonInput:
        """Return the value of `name`. The DAG is validated, so every name has a value."""
        task, inputs = self._task, self._task.inputs or self._dag.inputs
        if name in task.aliases:
            return self.by_name({name: task.aliases[name]})[name]
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
