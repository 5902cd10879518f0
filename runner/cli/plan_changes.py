"""Differences between a stored run and the present state of its plan file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from plait.errors import InvalidRequest
from plait.json_form import JsonInput, JsonValue
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.command_exits import print_note
from plait.runner.client.backend_set import BackendOptions, backend_set_of_file
from plait.runner.client.trusted_backends import StoredBackends
from plait.runner.plan import Plan, PlanError
from plait.runner.plan.plan_file import load_plan_of_run
from plait.runner.policies.follow_ups import FOLLOWS
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.policies.step_workflow import Workflow
from plait.runner.state.codec import decode_task
from plait.runner.state.stored_run import StoredPolicy
from plait.statuses import TaskStatus
from plait.task import MODEL_SETTINGS, Task

_MOST_NAMED = 5
_FIELDS = {
    **{name: name for name in ("prompt", "backend", "continues", "failure_mode", "retry", "timeout", "output_schema")},
    **{name: name for name in ("weight", "for_each", "at_most_once", "metadata", "when", *MODEL_SETTINGS)},
    **{name: name for name in ("files", "cache")},
    "adds_tasks": "output",
}
"""Fields of a task, with their names in a plan file."""
_STORED_COUNTS = "a resume runs the stored plan"


def repaired_prompts(record: RunRecord, tasks: Sequence[TaskRecord], stored: StoredBackends) -> dict[str, str]:
    """Return the prompts of failed tasks that differ in the plan file, by task id. Raises PlanError, InvalidRequest.

    A part takes the prompt of its `for_each` task.
    """
    path = stored.plan
    settings = json.loads(record.settings)
    if path is None or settings.get("posted") or settings.get("plan") is None:
        return {}
    plan = load_plan_of_run(path, settings.get("inputs", {})).fitted_to(stored.read_specs(), stored.default)
    now = {task.id: task.prompt for task in plan.dag}
    failed = [task for task in tasks if TaskStatus(task.status) is TaskStatus.FAILED]
    found = {task.task_id: now.get(task.task_id, now.get(task.added_by or "", task.prompt)) for task in failed}
    return {task.task_id: found[task.task_id] for task in failed if found[task.task_id] != task.prompt}


def print_plan_changes(
    record: RunRecord, tasks: Sequence[TaskRecord], stored: StoredBackends, taken: Collection[str] = ()
) -> None:
    """Print the changes of the plan file that a resume ignores, because the stored run counts; the prompts of the tasks
    in `taken` count. Values of inputs are not compared, as --set may have given them.
    """
    if taken:
        print_note(f"taking the prompts of {', '.join(taken)} from {stored.plan} for this run")
    if stored.replacements:
        print_note(f"using {', '.join(sorted(stored.replacements))} from {stored.files.backends} for this resume")
    path = stored.plan
    if path is None or not path.is_file():
        return
    try:
        ignored = {f"tasks.{task_id}.prompt" for task_id in taken}
        changed = [one for one in _list_changes(path, stored, record, tasks) if one not in ignored]
    except (PlanError, InvalidRequest):
        print_note(f"the plan file has mistakes by now (`plait check` lists them); {_STORED_COUNTS}")
        return
    if changed:
        more = [f"{len(changed) - _MOST_NAMED} more"] if len(changed) > _MOST_NAMED else []
        named = ", ".join([*changed[:_MOST_NAMED], *more])
        hint = "; --backends FILE takes backends from a file" if changed[0].startswith("backends.") else ""
        print_note(f"the plan file has changed since this run was stored ({named}); {_STORED_COUNTS}{hint}")


def _list_changes(path: Path, stored: StoredBackends, record: RunRecord, tasks: Sequence[TaskRecord]) -> Iterator[str]:
    settings, led_by = json.loads(record.settings), StoredPolicy.of(record)
    if settings.get("posted") or settings.get("plan") is None:
        yield from stored.changed_options(
            backend_set_of_file(path, BackendOptions()).specs
        )  # its tasks did not come from the file
        return
    plan = load_plan_of_run(path, settings.get("inputs", {})).fitted_to(stored.read_specs(), stored.default)
    yield from stored.changed_options(plan.backends)
    default = plan.default_backend or (next(iter(plan.backends)) if len(plan.backends) == 1 else None)
    if default is not None and default != stored.default:
        yield "defaults.backend"
    now = None if plan.policy is None else StoredPolicy(plan.policy.kind, _as_stored(plan.policy.settings()))
    if (kind := _given_by(now)) != _given_by(led_by):
        yield kind
    elif kind == "tasks":
        yield from _changed_tasks(plan, tasks)
    if (None if plan.dag.growth is None else asdict(plan.dag.growth)) != settings.get("growth"):
        yield "growth"
    if now != led_by and kind == _given_by(led_by):
        yield "follow_ups" if kind == "tasks" else kind


def _given_by(policy: StoredPolicy | None) -> str:
    """Return the key of a plan that gives the tasks of a run with `policy`."""
    kinds = {OrchestratorPolicy.kind: "orchestrate", Workflow.kind: "workflow"}
    return "tasks" if policy is None else kinds.get(policy.kind, "tasks")


def _as_stored(settings: Mapping[str, JsonInput]) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", json.loads(json.dumps(settings)))


def _changed_tasks(plan: Plan, tasks: Sequence[TaskRecord]) -> Iterator[str]:
    given = {task.task_id: decode_task(task) for task in tasks if task.added_by is None}
    given = {name: task for name, task in given.items() if FOLLOWS not in task.metadata}
    for task in plan.dag:
        before = given.pop(task.id, None)
        yield from [f"tasks.{task.id}"] if before is None else _changed_fields(before, task)
    yield from (f"tasks.{name}" for name in given)


def _changed_fields(before: Task, now: Task) -> Iterator[str]:
    if list(before.depends_on) != list(now.depends_on):
        yield f"tasks.{now.id}.depends_on"
    for field, name in _FIELDS.items():
        if getattr(before, field) != getattr(now, field):
            yield f"tasks.{now.id}.{name}"
