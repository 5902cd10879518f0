"""`plait resume`: continue a stored run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import click

from plait.errors import InvalidRequest
from plait.json_form import JsonInput, JsonValue
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli import run_report
from plait.runner.cli.command_options import (
    OutputOptions,
    apply_log_options,
    backends_option,
    command_line,
    complete,
    concurrency_option,
    hosts_option,
    json_option,
    log_options,
    plan_option,
    quiet_option,
    store_option,
    strict_option,
    verbose_option,
)
from plait.runner.cli.follow_run import follow_run
from plait.runner.cli.preview_report import print_resume
from plait.runner.cli.run_report import FinishedRun
from plait.runner.cli.terminal_output import print_note, redirect_prints
from plait.runner.cli.waiting_questions import print_watch_notice
from plait.runner.client.backend_set import BackendOptions, backend_set_of_file
from plait.runner.client.fork_run import repaired_prompts
from plait.runner.client.store_place import AnyStore, existing_store, find_newest_resumable, find_run, read_only_store
from plait.runner.client.trusted_backends import (
    FileOptions,
    StoredBackends,
    TrustedBackends,
    select_backends,
    statuses_after_resume,
)
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.plan import Plan, PlanError
from plait.runner.plan.plan_file import load_plan_of_run
from plait.runner.policies.follow_ups import FOLLOWS
from plait.runner.policies.goal_messages import ANSWER_ID
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.policies.step_workflow import Workflow
from plait.runner.recovery.resume import ResumeOptions
from plait.runner.state.codec import decode_dag, decode_task
from plait.runner.state.stored_run import StoredPolicy, ended_result, needs_no_work
from plait.statuses import RunStatus
from plait.task import MODEL_SETTINGS, Task


@click.command("resume")
@click.argument("run", required=False, shell_complete=complete)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Also run failed tasks, with --plan by the prompts in that file, and tasks with a damaged result.",
)
@click.option("--dry-run", is_flag=True, help="Only print the action for each task, with its reason.")
@plan_option
@backends_option
@hosts_option
@concurrency_option("as stored with the run")
@store_option
@strict_option
@json_option
@quiet_option
@verbose_option
@log_options
def resume_command(run: str | None, retry_failed: bool, **options: Any) -> int:
    """Continue RUN (an id, the beginning of an id, or `last`); without RUN, the newest run that can be resumed.

    Completed tasks are kept; interrupted and pending tasks are run. An interrupted conversation continues if its
    backend has kept the session.
    """
    apply_log_options(options["log_style"], options["log_level"])
    files = FileOptions(options["plan"], options["backends"], options["hosts"])
    resume = partial(_preview if options["dry_run"] else _resume, run, files, retry_failed=retry_failed)
    with redirect_prints():
        return anyio.run(resume, OutputOptions.of(options))


async def _preview(name: str | None, files: FileOptions, options: OutputOptions, *, retry_failed: bool) -> int:
    """Print the action of a resume for each task. Return the exit code."""
    assert options.store is not None
    async with read_only_store(options.store) as store:
        record = await _find(store, name, retry_failed)
        tasks = await store.list_tasks(record.run_id)
        print_watch_notice(record)
        trusted = TrustedBackends(store, files, note=print_note)
        preview = await trusted.runs().preview(record.run_id, retry_failed=retry_failed)
        stored = trusted.of(record)
        prompts = _repaired_prompts(record, tasks, stored) if retry_failed and not preview.ended else {}
        code = print_resume(preview, prompts, options.as_json)
        if not preview.ended and not await is_to_be_cancelled(store, record):
            try:
                select_backends(record, decode_dag(record, tasks), tasks, stored, retry_failed=retry_failed)
                _print_plan_changes(record, tasks, stored, prompts)
            except InvalidRequest as fault:
                raise InvalidRequest(f"a resume would be refused: {fault}") from None
        return code


async def _resume(name: str | None, files: FileOptions, options: OutputOptions, *, retry_failed: bool) -> int:
    """Resume a run. Return the exit code."""
    assert options.store is not None
    async with existing_store(options.store) as store:
        record = await _find(store, name, retry_failed)
        led_by = StoredPolicy.of(record)
        if led_by is not None and led_by.kind == OrchestratorPolicy.kind:
            options = replace(options, result_of=ANSWER_ID)
        trusted = TrustedBackends(store, files, note=print_note, concurrency=options.concurrency, strict=options.strict)
        runs = trusted.runs()
        run = await runs.read(record.run_id)
        dag, tasks = run.state.dag, run.tasks
        if needs_no_work(run, retry_failed):
            return _print_ended(ended_result(run), dag, options)
        stored = None if await is_to_be_cancelled(store, record) else trusted.of(record)
        prompts = {} if stored is None or not retry_failed else _repaired_prompts(record, tasks, stored)
        statuses = statuses_after_resume(dag, tasks, retry_failed=retry_failed)
        async with runs.open(run, ResumeOptions(retry_failed, prompts=prompts)) as (continued, chosen):
            if stored is not None:
                _print_plan_changes(record, tasks, stored, prompts)
            return await follow_run(continued, dag, replace(options, concurrency=chosen.concurrency), store, statuses)


async def _find(store: AnyStore, name: str | None, retry_failed: bool) -> RunRecord:
    return await (find_newest_resumable(store, retry_failed) if name is None else find_run(store, name))


def _repaired_prompts(record: RunRecord, tasks: Sequence[TaskRecord], stored: StoredBackends) -> dict[str, str]:
    """Return the prompts of failed tasks that differ in the plan file of the caller, if there is one. Raises PlanError,
    InvalidRequest.
    """
    settings = json.loads(record.settings)
    if stored.files.plan is None or stored.plan is None or settings.get("posted") or settings.get("plan") is None:
        return {}
    plan = load_plan_of_run(stored.plan, settings.get("inputs", {})).fitted_to(stored.read_specs(), stored.default)
    return repaired_prompts(plan.dag, tasks)


def _print_ended(result: RunResult, dag: DAG, options: OutputOptions) -> int:
    """Print the result of a run that has ended, and the command that shows the run. Return the exit code."""
    if options.as_json:
        run_report.print_result_json(FinishedRun(result, dag), options.store)
    elif options.quiet:
        run_report.print_result(dag, result, options.result_of)
    else:
        hint = "" if result.status is RunStatus.COMPLETED else "; --retry-failed runs what failed again"
        print_note(f"run {result.run_id} is {result.status.value}, nothing is left to do{hint}")
        print_note(f"  {'show':<9} {command_line(options.store, 'show', result.run_id)}")
    return run_report.exit_code(result)


_NAMED = 5
_FIELDS = {
    **{name: name for name in ("prompt", "backend", "continues", "failure_mode", "retry", "timeout", "output_schema")},
    **{name: name for name in ("weight", "for_each", "at_most_once", "metadata", "when", *MODEL_SETTINGS)},
    **{name: name for name in ("files", "cache")},
    "adds_tasks": "output",
}
"""Fields of a task, with their names in a plan file."""
_STORED_COUNTS = "a resume runs the stored plan"


def _print_plan_changes(
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
        more = [f"{len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
        named = ", ".join([*changed[:_NAMED], *more])
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
