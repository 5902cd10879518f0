"""A run that begins from a point of a stored run: `fork` from a task on, `try_task` for one task beside the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plait.errors import PlaitError, TaskNotFound, nearest
from plait.events import RunCreated
from plait.json_form import JsonInput
from plait.persistence.store_protocol import Store
from plait.runner.client.create_run import RESERVED_SETTINGS
from plait.runner.domain.dag import DAG
from plait.runner.domain.groups import group_of
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import named
from plait.runner.policies import policy_of
from plait.runner.prompts.prompt_template import names_used
from plait.runner.reuse.answer_keys import Reuse
from plait.runner.reuse.earlier_answers import ForkPoint, given_answer, positions_of, unfinished_tasks
from plait.runner.state.stored_run import StoredPolicy, StoredRun, stored_run
from plait.statuses import TaskStatus
from plait.task import Task, with_prompt

_RECORDED = "(recorded in the earlier run)"


@dataclass(frozen=True, slots=True)
class ForkEdits:
    """The changes of a fork."""

    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """New prompts, by task id; the id of a `for_each` task stands for its parts."""
    inputs: Mapping[str, JsonInput] = field(default_factory=dict[str, JsonInput])
    """New values of inputs, by name."""
    results: Mapping[str, str] = field(default_factory=dict[str, str])
    """Results that tasks take in place of a call, by task id; JSON for a task with an output schema."""


NO_EDITS = ForkEdits()


@dataclass(frozen=True, slots=True)
class Fork:
    """A new run to be made from a stored run."""

    dag: DAG
    """The tasks of the new run."""
    policy: Policy | None
    """The policy of the stored run."""
    settings: Mapping[str, Any]
    """The settings that are stored with the new run."""
    reuse: Reuse
    """The stored run, and the point from which the new run goes on."""


async def plan_fork(store: Store | None, run_id: str, start: str, edits: ForkEdits = NO_EDITS) -> Fork:
    """Return the fork of the run from the task `start` on. Raises StoreRequired, RunNotFound, TaskNotFound, DAGError,
    PlaitError for an edit that does not fit, StoreError.
    """
    run = await stored_run(store, run_id)
    given = await _tasks_of_plan(run)
    _require_tasks(run, [start, *edits.prompts, *edits.results])
    added = {task.id for task in run.state.dag} - {task.id for task in given} - _groups(given)
    for name in edits.prompts:
        if name in added:
            raise PlaitError(f"the prompt of {name!r} was made during the run; change the task that added it")
    for name, text in edits.results.items():
        if run.state.dag[name].for_each is not None:
            raise PlaitError(f"task {name!r} gathers the results of its parts; give the results of parts: {name}.1")
        await given_answer(run.state.dag[name], text)
    _require_inputs(run, edits.inputs)
    tasks = [_edited(task, edits.prompts) for task in given]
    dag = run.state.dag
    changed = DAG(tasks, name=dag.name, inputs={**dag.inputs, **edits.inputs}, growth=dag.growth)
    unfinished = unfinished_tasks(run.state, positions_of(run.state, edits.results))
    roots = {start, *edits.prompts, *_reading(run, edits.inputs), *(dag.tasks[one].id for one in unfinished)}
    point = ForkPoint(tuple(sorted(roots)), dict(edits.results))
    return Fork(changed, _policy(run), _settings(run), Reuse(run_id, (start,), point))


async def plan_try(store: Store | None, run_id: str, task_id: str, prompt: str | None, backend: str | None) -> Fork:
    """Return a run of the task alone, on its recorded inputs, with another prompt or backend if not None. Raises as
    `plan_fork`.
    """
    run = await stored_run(store, run_id)
    run.require_task(task_id)
    task = run.state.dag[task_id]
    if task.for_each is not None:
        raise PlaitError(f"task {task_id!r} stands for its parts; try one of them: {task_id}.1")
    if prompt is not None:
        task = with_prompt(task, prompt)
    tried = replace(task, backend=backend or task.backend, adds_tasks=False, for_each=None)
    names = _read_by(run, tried)
    recorded = [_as_recorded(run, name, names) for name in names]
    tried = replace(tried, depends_on=tuple(one.id for one in recorded if one.id != tried.continues))
    dag = DAG([*recorded, tried], name=run.state.dag.name, inputs=run.state.dag.inputs)
    point = ForkPoint((task_id,), _empty_results(run, recorded), tries=task_id)
    return Fork(dag, None, _settings(run), Reuse(run_id, (task_id,), point))


async def _tasks_of_plan(run: StoredRun) -> list[Task]:
    """Return the tasks with which the run began, without those that were added later."""
    (created,) = await run.store.list_events(run.record.run_id, 0, 1, RunCreated.kind)
    return list(run.state.dag.tasks[: json.loads(created.detail)["tasks"]])


def _groups(tasks: Iterable[Task]) -> set[str]:
    return {name for task in tasks if (name := group_of(task.id, task.item)) is not None}


def _require_tasks(run: StoredRun, names: Collection[str]) -> None:
    dag = run.state.dag
    for name in names:
        if not positions_of(run.state, [name]):
            hint = nearest(name, (task.id for task in dag))
            raise TaskNotFound(f"run {run.record.run_id} has no task {name!r}{hint}")


def _edited(task: Task, prompts: Mapping[str, str]) -> Task:
    prompt = prompts.get(task.id, prompts.get(group_of(task.id, task.item) or ""))
    return task if prompt is None else with_prompt(task, prompt)


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
        names = names_used(task.prompt).names
        if "inputs" in names or changed & set(names):
            yield task.id


def _policy(run: StoredRun) -> Policy | None:
    stored = StoredPolicy.of(run.record)
    return None if stored is None else policy_of(stored.kind, stored.settings)


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings of the caller, without those of plait."""
    stored = json.loads(run.record.settings)
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
    if status is not TaskStatus.COMPLETED and not _ended_softly(status, task):
        raise PlaitError(f"task {name!r} of run {run.record.run_id} has no result yet ({status.value})")
    schema = task.output_schema if status is TaskStatus.COMPLETED else None
    continues = task.continues if task.continues in names else None
    return Task(name, _RECORDED, (), run.state.dag.backend_of(task), continues=continues, output_schema=schema)


def _ended_softly(status: TaskStatus, task: Task) -> bool:
    return status in {TaskStatus.FAILED, TaskStatus.SKIPPED} and task.failure_mode != "hard"


def _empty_results(run: StoredRun, recorded: Iterable[Task]) -> dict[str, str]:
    """Return an empty result for each task that ended without one, as its dependents read it."""
    return {task.id: "" for task in recorded if not run.state.is_completed(task.id)}
