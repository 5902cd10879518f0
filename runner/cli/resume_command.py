"""`plait resume`: continue a stored run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import click

from plait.errors import InvalidRequest
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli import run_report
from plait.runner.cli.command_exits import COMPLETED, print_line, print_note, redirect_prints
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
from plait.runner.cli.plan_changes import print_plan_changes, repaired_prompts
from plait.runner.cli.run_report import FinishedRun
from plait.runner.cli.terminal_output import as_line, counted
from plait.runner.cli.waiting_questions import print_watch_notice
from plait.runner.client.backend_set import BackendSet, stored_concurrency
from plait.runner.client.store_place import existing_store, find_newest_resumable, find_run, read_only_store
from plait.runner.client.trusted_backends import (
    FileOptions,
    StoredBackends,
    cancelling_runner,
    inspecting_runner,
    select_backends,
)
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.policies.goal_messages import ANSWER_ID
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.recovery.resume import Preview
from plait.runner.recovery.resume_plan import ResumeAction, ResumeStep
from plait.runner.state.codec import decode_dag
from plait.runner.state.stored_run import StoredPolicy, has_ended
from plait.runner.views.view_models import PreviewView, view_json
from plait.statuses import RunStatus, TaskStatus

_WIDEST = max(len(action.value) for action in ResumeAction)
_MOST_NAMED = 5
_MOST_KEPT = 20
"""Completed tasks are listed up to this number; a longer list would hide the other tasks."""


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
    request = ResumeRequest(
        run, retry_failed, FileOptions(options["plan"], options["backends"], options["hosts"]), options["dry_run"]
    )
    with redirect_prints():
        return anyio.run(resume_run, request, OutputOptions.of(options))


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The run to resume, and how."""

    run: str | None
    """Name of the run; None for the newest resumable run."""
    retry_failed: bool = False
    files: FileOptions = FileOptions()  # noqa: RUF009 - frozen
    dry_run: bool = False


async def resume_run(request: ResumeRequest, options: OutputOptions) -> int:
    """Resume a run. Return the exit code."""
    assert options.store is not None
    open_store = read_only_store if request.dry_run else existing_store
    async with open_store(options.store) as store:
        if request.run is None:
            record = await find_newest_resumable(store, request.retry_failed)
        else:
            record = await find_run(store, request.run)
        tasks = await store.list_tasks(record.run_id)
        dag = decode_dag(record, tasks)
        led_by = StoredPolicy.of(record)
        if led_by is not None and led_by.kind == OrchestratorPolicy.kind:
            options = replace(options, result_of=ANSWER_ID)
        reader = BackendSet({}).make_runner({}, store=store)
        if request.dry_run:
            print_watch_notice(record)
            async with inspecting_runner(store, record, tasks, request.files, print_note) as runner:
                preview = await runner.preview_resume(record.run_id, retry_failed=request.retry_failed)
            prompts = {} if preview.ended else _prompts(request, record, tasks)
            code = print_preview(_with_prompts(preview, prompts), options.as_json)
            if not preview.ended and not await is_to_be_cancelled(store, record):
                try:
                    stored = StoredBackends.of(record, request.files)
                    select_backends(record, dag, tasks, stored, retry_failed=request.retry_failed)
                    print_plan_changes(record, tasks, stored, prompts)
                except InvalidRequest as fault:
                    raise InvalidRequest(f"a resume would be refused: {fault}") from None
            return code
        if has_ended(record, tasks, request.retry_failed):
            return _print_ended(await reader.resume(record.run_id), dag, options)
        if await is_to_be_cancelled(store, record):  # cancelling needs no backend but those on hosts
            async with cancelling_runner(store, record, request.files, print_note) as ending:
                return await follow_run(ending.start_resume(record.run_id), dag, options, store)
        stored = StoredBackends.of(record, request.files)
        backend_set, names, statuses = select_backends(record, dag, tasks, stored, retry_failed=request.retry_failed)
        prompts = _prompts(request, record, tasks)
        print_plan_changes(record, tasks, stored, prompts)
        async with backend_set.open(names) as made:
            concurrency = options.concurrency or stored_concurrency(record) or backend_set.concurrency()
            runner = backend_set.make_runner(made, store=store, concurrency=concurrency, strict=options.strict)
            run = runner.start_resume(record.run_id, retry_failed=request.retry_failed, prompts=prompts)
            return await follow_run(run, dag, replace(options, concurrency=concurrency), store, statuses)


def _prompts(request: ResumeRequest, record: RunRecord, tasks: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the new prompts of failed tasks, if the request names a plan file and runs failed tasks."""
    if not request.retry_failed or request.files.plan is None:
        return {}
    return repaired_prompts(record, tasks, StoredBackends.of(record, request.files))


def _with_prompts(preview: Preview, prompts: Collection[str]) -> Preview:
    """Return the preview with the new prompts in the reasons."""
    steps = {
        name: replace(step, reason=f"{step.reason}; with the prompt of the plan") if name in prompts else step
        for name, step in preview.tasks.items()
    }
    return replace(preview, tasks=steps)


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


def print_preview(preview: Preview, as_json: bool) -> int:
    """Print the preview. Return the exit code."""
    if as_json:
        run_report.print_json(view_json(PreviewView.of(preview)))
        return COMPLETED
    shown = list(preview.tasks.values())
    others = [step for step in shown if not _is_kept(step)]
    if (kept := len(shown) - len(others)) > _MOST_KEPT:
        print_line(
            f"{ResumeAction.KEEP.value:<{_WIDEST}}  {kept:,} tasks: {TaskStatus.COMPLETED.value} (--json names them)"
        )
        shown = others
    for step in shown:
        print_line(f"{step.action.value:<{_WIDEST}}  {as_line(step.task_id)}: {as_line(step.reason, 300)}")
    print_line(_summarize(preview))
    return COMPLETED


def _is_kept(step: ResumeStep) -> bool:
    return step.action is ResumeAction.KEEP and step.reason == TaskStatus.COMPLETED.value


def _summarize(preview: Preview) -> str:
    run = f"run {preview.run_id}"
    if preview.ended:
        hint = "; --retry-failed runs what failed again" if preview.status is RunStatus.FAILED else ""
        left = _summarize_damage(preview) or "nothing is left to do"
        return f"{run} is {preview.status.value}; {left}{hint}"
    counts = Counter(step.action for step in preview.tasks.values())
    parts = [f"{counts[action]:,} {action.value}" for action in ResumeAction if counts[action]]
    again = len(preview.repeats)
    bill = f"{counted(again, 'task')} possibly billed twice" if again else "nothing billed twice"
    if again:
        bill += f", about {preview.repeated_input_tokens:,} input tokens and the output before the interruption"
    return "; ".join(filter(None, (f"{run}: {', '.join(parts)}", bill, _summarize_damage(preview))))


def _summarize_damage(preview: Preview) -> str:
    """Return the damage to results of tasks that would not run again; empty without damage."""
    count, named = len(preview.damaged), ", ".join(map(as_line, preview.damaged[:_MOST_NAMED]))
    more = ", ..." if count > _MOST_NAMED else ""
    return f"{counted(count, 'damaged result')}, counted as failed: {named}{more}" if count else ""
