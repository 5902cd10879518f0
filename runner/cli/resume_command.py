"""`plait resume`: continue a stored run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import click

from plait.errors import InvalidRequest
from plait.persistence.store_records import RunRecord
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
from plait.runner.client.store_place import AnyStore, existing_store, find_newest_resumable, find_run, read_only_store
from plait.runner.client.trusted_backends import (
    FileOptions,
    StoredBackends,
    TrustedBackends,
    plan_changes,
    repaired_prompts,
)
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.plan import PlanError
from plait.runner.policies.goal_messages import ANSWER_ID
from plait.runner.policies.goal_policy import OrchestratorPolicy
from plait.runner.recovery.resume import ResumeOptions
from plait.runner.state.stored_run import StoredPolicy, StoredRun, ended_result, needs_no_work
from plait.statuses import RunStatus


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
        trusted = TrustedBackends(store, files, note=print_note)
        runs = trusted.runs()
        record = await _find(store, name, retry_failed)
        run = await runs.read(record.run_id, record)
        print_watch_notice(record)
        preview = await runs.preview_read(run, retry_failed=retry_failed)
        stored = trusted.of(record)
        prompts = repaired_prompts(run, stored) if retry_failed and not preview.ended else {}
        code = print_resume(preview, prompts, options.as_json)
        if not preview.ended and not await is_to_be_cancelled(store, record):
            try:
                stored.needed(run, retry_failed=retry_failed)
                _print_plan_changes(run, stored, prompts)
            except InvalidRequest as fault:
                raise InvalidRequest(f"a resume would be refused: {fault}") from None
        return code


async def _resume(name: str | None, files: FileOptions, options: OutputOptions, *, retry_failed: bool) -> int:
    """Resume a run. Return the exit code."""
    assert options.store is not None
    async with existing_store(options.store) as store:
        trusted = TrustedBackends(store, files, note=print_note, concurrency=options.concurrency, strict=options.strict)
        runs = trusted.runs()
        record = await _find(store, name, retry_failed)
        run = await runs.read(record.run_id, record)
        dag, led_by = run.state.dag, StoredPolicy.of(record)
        if led_by is not None and led_by.kind == OrchestratorPolicy.kind:
            options = replace(options, result_of=ANSWER_ID)
        if needs_no_work(run, retry_failed):
            return _print_ended(ended_result(run), dag, options)
        stored = None if await is_to_be_cancelled(store, record) else trusted.of(record)
        prompts = repaired_prompts(run, stored) if stored is not None and retry_failed else {}
        async with runs.open(run, ResumeOptions(retry_failed, prompts=prompts)) as (continued, chosen):
            if stored is not None:
                _print_plan_changes(run, stored, prompts)
            after = run.statuses_of_resume(retry_failed=retry_failed)
            statuses = {task.id: status for task, status in zip(dag, after, strict=True)}
            return await follow_run(continued, dag, replace(options, concurrency=chosen.concurrency), store, statuses)


async def _find(store: AnyStore, name: str | None, retry_failed: bool) -> RunRecord:
    return await (find_newest_resumable(store, retry_failed) if name is None else find_run(store, name))


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
_STORED_COUNTS = "a resume runs the stored plan"


def _print_plan_changes(run: StoredRun, stored: StoredBackends, taken: Collection[str] = ()) -> None:
    """Print the changes of the plan file that a resume ignores, because the stored run counts; the prompts of the tasks
    in `taken` count.
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
        changed = [key for key in plan_changes(run, stored, path) if key not in ignored]
    except (PlanError, InvalidRequest):
        print_note(f"the plan file has mistakes by now (`plait check` lists them); {_STORED_COUNTS}")
        return
    if changed:
        more = [f"{len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
        named = ", ".join([*changed[:_NAMED], *more])
        hint = "; --backends FILE takes backends from a file" if changed[0].startswith("backends.") else ""
        print_note(f"the plan file has changed since this run was stored ({named}); {_STORED_COUNTS}{hint}")
