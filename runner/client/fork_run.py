"""A run that begins from a point of a stored run: from a task on, or one task alone beside the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from plait.errors import PlaitError, nearest
from plait.events import RunCreated
from plait.json_form import JsonInput, value
from plait.persistence.store_protocol import Store
from plait.runner.client.create_run import RESERVED_SETTINGS
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import named, names_of
from plait.runner.policies import policy_of
from plait.runner.reuse.earlier_answers import (
    ReuseFrom,
    given_answer,
    positions_of,
    require_tasks,
    require_whole,
    unfinished_tasks,
)
from plait.runner.state.stored_run import StoredPolicy, StoredRun, read_settings, stored_run
from plait.statuses import TaskStatus
from plait.task import FailureMode, Task, with_prompt

_RECORDED = "(recorded in the earlier run)"


@value
class Fork:
    """A new run to be made from a stored run."""

    dag: DAG
    """The tasks of the new run."""
    policy: Policy | None
    """The policy of the stored run."""
    settings: Mapping[str, Any]
    """The settings that are stored with the new run."""
    reuse: ReuseFrom
    """The stored run, and the point from which the new run goes on."""


async def plan_fork(
    store: Store | None,
    run_id: str,
    start: str,
    *,
    prompts: Mapping[str, str],
    inputs: Mapping[str, JsonInput],
    results: Mapping[str, str],
    only: bool = False,
    backend: str | None = None,
) -> Fork:
    """Return the fork of the run from the task `start` on, or, with `only`, a run of that task alone on its recorded
    inputs: see `Runs.fork`.
    """
    run = await stored_run(store, run_id)
    require_whole(run)
    require_tasks([start, *prompts, *results], run.state.dag.tasks, f"run {run_id}")
    _require_inputs(run, inputs)
    if only:
        if results or prompts.keys() - {start}:
            raise PlaitError(f"only task {start!r} runs, so no other task takes a prompt or a result")
        return _fork_of_one(run, start, prompts.get(start), inputs, backend)
    if backend is not None:
        raise PlaitError("another backend is for a fork of one task only")
    (created,) = await run.store.list_events(run.record.run_id, 0, 1, RunCreated.kind)
    tasks = run.state.dag.tasks[: json.loads(created.detail)["tasks"]]  # without those that were added later
    added = {task.id for task in run.state.dag} - {task.id for task in tasks}
    added -= {group_of(task.id, task.item) for task in tasks}
    for name in prompts:
        if name in added:
            raise PlaitError(f"the prompt of {name!r} was made during the run; change the task that added it")
    for name, text in results.items():
        if name not in run.state.dag or run.state.dag[name].gathers:
            raise PlaitError(f"task {name!r} gathers the results of its parts; give the results of parts: {name}.1")
        await given_answer(run.state.dag[name], text)
    dag = run.state.dag
    edited = [task if (prompt := edited_prompt(task, prompts)) is None else with_prompt(task, prompt) for task in tasks]
    changed = DAG(edited, name=dag.name, inputs={**dag.inputs, **inputs}, growth=dag.growth)
    unfinished = unfinished_tasks(run.state, positions_of(run.state, results))
    roots = {start, *prompts, *_reading(run, inputs), *(dag.tasks[position].id for position in unfinished)}
    stored = StoredPolicy.of(run.record)
    policy = None if stored is None else policy_of(stored.kind, stored.settings)
    reuse = ReuseFrom(run_id, (start,), roots=tuple(sorted(roots)), results=dict(results))
    return Fork(changed, policy, _settings(run), reuse)


def edited_prompt(task: Task, prompts: Mapping[str, str]) -> str | None:
    """Return the new prompt of the task among `prompts`, by task id; the id of a `for_each` task stands for its parts.
    None without one.
    """
    return prompts.get(task.id, prompts.get(group_of(task.id, task.item) or ""))


def _fork_of_one(
    run: StoredRun, task_id: str, prompt: str | None, inputs: Mapping[str, JsonInput], backend: str | None
) -> Fork:
    dag = run.state.dag
    if task_id not in dag or dag[task_id].gathers:
        raise PlaitError(f"task {task_id!r} stands for its parts; try one of them: {task_id}.1")
    task = dag[task_id]
    if prompt is not None:
        task = with_prompt(task, prompt)
    if backend is not None:
        task = replace(task, backend=backend, arguments=())
    task = replace(task, adds_tasks=False, for_each=None)
    names = _read_by(run, task)
    recorded = [_as_recorded(run, name, names) for name in names]
    task = replace(task, depends_on=tuple(each.id for each in recorded if each.id != task.continues))
    # A task that ended without a result is read as empty.
    results = {each.id: "" for each in recorded if not run.state.is_completed(each.id)}
    reuse = ReuseFrom(run.record.run_id, (task_id,), roots=(task_id,), results=results, only=task_id)
    return Fork(DAG([*recorded, task], name=dag.name, inputs={**dag.inputs, **inputs}), None, _settings(run), reuse)


def _require_inputs(run: StoredRun, inputs: Mapping[str, JsonInput]) -> None:
    known = run.state.dag.inputs
    for name in inputs:
        if name not in known:
            there_are = f"; the run has {', '.join(map(repr, known))}" if known else "; the run has no inputs"
            raise PlaitError(f"there is no input {name!r}{nearest(name, known) or there_are}")
        parts = [task.item for task in run.state.dag if group_of(task.id, task.item) is not None]
        value = known[name]
        if isinstance(value, list) and value and all(item in parts for item in value):
            raise PlaitError(
                f"the plan made a task for each element of input {name!r}, so a fork cannot change the input; run the "
                f"plan with the new value like this run (plait run PLAN --set {name}=... --like {run.record.run_id})"
            )


def _reading(run: StoredRun, inputs: Mapping[str, JsonInput]) -> Iterable[str]:
    """Return the tasks whose prompts name one of the changed inputs."""
    changed = {name for name, value in inputs.items() if run.state.dag.inputs[name] != value}
    for task in run.state.dag if changed else ():
        names = names_of(task).names
        if "inputs" in names or changed & set(names):
            yield task.id


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings of the caller, without those of plait."""
    stored = read_settings(run.record)
    return {name: value for name, value in stored.items() if name not in RESERVED_SETTINGS}


def _read_by(run: StoredRun, task: Task) -> list[str]:
    """Return the tasks that determine the prompt and the conversation of `task`, in the order of the run."""
    dag, names = run.state.dag, named(task)
    if "results" in names:
        names |= set(task.upstream)
    found = {name for name in names if name in dag}
    before = task.continues
    while before is not None:
        found.add(before)
        before = dag[before].continues
    return sorted(found, key=dag.position)


def _as_recorded(run: StoredRun, name: str, names: Collection[str]) -> Task:
    """Return the task as a mere holder of its recorded result, in a conversation of tasks in `names`."""
    task, status = run.state.dag[name], run.state.statuses[run.state.dag.position(name)]
    is_soft_end = status in {TaskStatus.FAILED, TaskStatus.SKIPPED} and task.failure_mode is not FailureMode.HARD
    if status is not TaskStatus.COMPLETED and not is_soft_end:
        raise PlaitError(f"task {name!r} of run {run.record.run_id} has no result yet ({status.value})")
    schema = task.output_schema if status is TaskStatus.COMPLETED else None
    continues = task.continues if task.continues in names else None
    return Task(name, _RECORDED, (), run.state.dag.backend_of(task), continues=continues, output_schema=schema)
