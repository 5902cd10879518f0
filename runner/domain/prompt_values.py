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


Results: TypeAlias = Mapping[str, "str | Sequence[str]"]
"""The results of a called plan by name: the id of a task, or the ids of the tasks that `for_each` made."""


class TaskTexts:
    """The texts of `task` with the values of their names. `results` maps positions in `dag` to the results of done
    tasks. The DAG is validated, so every name has a value; what renders a text may raise PromptError.
    """

    def __init__(self, task: Task, dag: DAG, results: Mapping[int, TaskResult]) -> None:
        self._task = task
        self._dag = dag
        self._results = results

    def prompt(self) -> str:
        """Return the rendered prompt, or the command as a message."""
        task = self._task
        if task.run:
            values = self.values()
            return command_text([render(word, values) for word in task.run], render(task.prompt, values), task.codes)
        return render(task.prompt, self.values()) if "{" in task.prompt else task.prompt

    def check_words(self) -> list[str]:
        """Return the rendered words of the check; none without a check."""
        if self._task.check is None:
            return []
        values = self.values()
        return [render(word, values) for word in self._task.check.run]

    def workspace(self) -> Workspace | None:
        """Return where the program of the task works: by default where that of the task does which it continues; None
        for where its backend does.
        """
        named_by = self._task
        while named_by.cwd is None and named_by.continues is not None:
            named_by = self._dag[named_by.continues]
        if (path := named_by.cwd) is None and not self._task.env:
            return None
        values = self.values()
        place = Workspace(env={name: render(text, values) for name, text in self._task.env.items()})
        if path is None:
            return place
        if "{" not in path:
            return replace(place, cwd=path)
        written, slash, rest = path.partition("{")[0].rpartition("/")
        values = TaskTexts(named_by, self._dag, self._results).values()
        below = render(rest + path[len(written + slash + rest) :], values)
        return replace(place, cwd=written or slash or ".", below=below)

    def passes(self, answer: JsonInput) -> bool:
        """Return whether the condition in the check is true of `answer`."""
        check = self._task.check
        return is_true("true" if check is None else check.passes or "true", self._check_values(answer))

    def judge_prompt(self, answer: JsonInput) -> str:
        """Return the rendered prompt for the judge of `answer`."""
        check = self._task.check
        return render("" if check is None else check.judge or "", self._check_values(answer))

    def _check_values(self, answer: JsonInput) -> dict[str, JsonInput]:
        """Return the value of each name in the check, `answer` included."""
        texts = [] if self._task.check is None else list(check_texts(self._task.check))
        has_data, values = any("data" in text for text, _, _ in texts), dict[str, JsonInput]()
        for _, names, _ in texts:
            values |= self._values(names, has_data=has_data)
        return {**values, ANSWER: structured(answer) if has_data else answer}

    def check_key(self) -> list[JsonInput]:
        """Return what determines the check and the folder of the task; nothing without them."""
        place, check = self.workspace(), self._task.check
        if place is not None:
            elsewhere = replace(self._task, cwd=None, env={}, continues=None)
            return [as_json(place), *TaskTexts(elsewhere, self._dag, self._results).check_key()]
        if check is None:
            return []
        values = self._check_values(None) if check.passes or check.judge else {}
        further = [check.output_schema, check.passes, check.judge, check.backend, values]
        return [*self.check_words(), *(cast("list[JsonInput]", further) if any(further) else [])]

    def values(self) -> dict[str, JsonInput]:
        """Return the value of each name in the texts but the condition."""
        return self._values(names_of(self._task), has_data=any("data" in text for text in self._task.texts))

    def is_wanted(self) -> bool:
        """Return whether the condition of the task, if any, is true."""
        if self._task.when is None:
            return True
        names = condition_names(self._task.when)[0]
        return is_true(self._task.when, self._values(names, has_data="data" in self._task.when))

    def call_inputs(self, previous: Results) -> dict[str, JsonInput]:
        """Return the inputs of the plan that the task calls. `previous` are the results of the round before; empty in
        the first.
        """
        call = self._task.call
        assert call is not None
        values = self._values(names_of(self._task), has_data=True)
        if call.is_loop:
            values[PREVIOUS] = _by_name(previous, self._dag, self._results, has_data=True) or NoResult()
        inputs = {name: evaluated(value, values) for name, value in call.values.items()}
        return {**call.inputs, **inputs}

    def argument_values(self) -> dict[str, JsonInput]:
        """Return the value of each name in the arguments of the task."""
        return {name: self._value(name, has_data=False) for name in self._task.arguments}

    def _values(self, used: PromptNames, *, has_data: bool) -> dict[str, JsonInput]:
        """Return the values of the names in `used`. `has_data`: a text may name the field `data` of a result."""
        values = {name: self._value(name, has_data=has_data) for name in used.names}
        if "results" in values:
            task = self._task
            names = sorted({*task.upstream, *used.results} - task.aliases.keys(), key=self._dag.position)
            values["results"] = {name: self._value(name, has_data=has_data) for name in [*names, *task.aliases]}
        return values

    def _value(self, name: str, *, has_data: bool) -> JsonInput:
        task, inputs = self._task, self._task.inputs or self._dag.inputs
        if name == PREVIOUS and task.call is not None and task.call.is_loop:
            return NoResult()  # the round before differs from round to round: see `call_inputs`
        if name in task.aliases:
            return _by_name({name: task.aliases[name]}, self._dag, self._results, has_data=has_data)[name]
        if name == "item":
            return task.item
        if name == "inputs":
            return dict(inputs)
        if name in inputs:
            return inputs[name]
        return None if name == "results" else _result(name, self._dag, self._results, has_data=has_data)


def round_values(
    inputs: Mapping[str, JsonInput], names: Results, dag: DAG, results: Mapping[int, TaskResult]
) -> dict[str, JsonInput]:
    """Return the values of the names in `until` and `returns` of a called plan with these inputs and results."""
    by_name = _by_name(names, dag, results, has_data=True)
    return {**inputs, **by_name, "inputs": inputs, "results": by_name}


def _by_name(names: Results, dag: DAG, results: Mapping[int, TaskResult], *, has_data: bool) -> dict[str, JsonInput]:
    """Return the results by their names."""
    return {
        name: _result(ids, dag, results, has_data=has_data)
        if isinstance(ids, str)
        else [_result(task_id, dag, results, has_data=has_data) for task_id in ids]
        for name, ids in names.items()
    }


def _result(task_id: str, dag: DAG, results: Mapping[int, TaskResult], *, has_data: bool) -> JsonInput:
    """Return the value of a task; `NoResult` if the task was skipped or failed softly."""
    result = results.get(dag.position(task_id))
    if result is None or result.status is not TaskStatus.COMPLETED:
        return NoResult()
    return structured(result.value) if has_data else result.value


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
