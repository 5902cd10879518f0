"""`plait resume`: continue a stored run."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import click

from plait.errors import InvalidRequest
from plait.runner.cli.command_options import (
    OutputOptions,
    async_command,
    backends_option,
    budget_options,
    complete,
    concurrency_option,
    hosts_option,
    output_options,
    park_option,
    plan_option,
    print_next,
    store_option,
    strict_option,
)
from plait.runner.cli.follow_run import follow_run
from plait.runner.cli.preview_report import print_resume
from plait.runner.cli.run_report import exit_code, print_result, print_result_json, print_watch_notice
from plait.runner.cli.terminal_output import print_note
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import (
    FileOptions,
    StoredBackends,
    TrustedBackends,
    plan_changes,
    repaired_prompts,
    result_task,
)
from plait.runner.client.runs import Runs
from plait.runner.domain.dag import group_of
from plait.runner.engine.run_options import open_store
from plait.runner.plan import PlanError
from plait.runner.recovery.resume import ResumeOptions, find_newest_resumable
from plait.runner.state.stored_run import StoredRun, ended_result, needs_no_work
from plait.runner.views.event_sentences import named_tasks
from plait.runner.views.run_progress import Progress
from plait.statuses import RunStatus


@async_command("resume")
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
@budget_options
@park_option
@store_option
@strict_option
@output_options
async def resume_command(run: str | None, retry_failed: bool, **options: Any) -> int:
    """Continue RUN (an id, the beginning of an id, or `last`); without RUN, the newest run that can be resumed.

    Completed tasks are kept; interrupted and pending tasks are run. An interrupted conversation continues if its
    backend has kept the session.
    """
    files = FileOptions(options["plan"], options["backends"], options["hosts"])
    output, is_preview = OutputOptions.of(options), options["dry_run"]
    async with open_store(options["store_path"], "read" if is_preview else "existing") as store:
        of_runner = {name: options[name] for name in ("concurrency", "strict", "park", "budget", "unpriced")}
        trusted = TrustedBackends(store, files, note=print_note, **of_runner)
        runs = trusted.runs()
        record = await (
            find_newest_resumable(store, retry_failed=retry_failed) if run is None else find_run(store, run)
        )
        stored = await runs.read(record.run_id, record)
        if not is_preview and needs_no_work(stored, retry_failed):
            return _print_ended(stored, output)
        backends = None if stored.to_be_cancelled else trusted.of(record)
        if is_preview:
            return await _preview(runs, stored, backends, output, retry_failed=retry_failed)
        return await _resume(runs, stored, backends, output, retry_failed=retry_failed)


async def _preview(
    runs: Runs, run: StoredRun, backends: StoredBackends | None, options: OutputOptions, *, retry_failed: bool
) -> int:
    """Print the action of a resume for each task. Return the exit code."""
    print_watch_notice(run.record)
    preview = await runs.preview_read(run, retry_failed=retry_failed)
    is_repair = backends is not None and retry_failed and not preview.ended
    prompts = repaired_prompts(run, backends) if backends is not None and is_repair else {}
    code = print_resume(preview, prompts, options.as_json)
    if backends is not None and not preview.ended:
        try:
            backends.needed(run, retry_failed=retry_failed)
            _print_plan_changes(run, backends, prompts)
        except InvalidRequest as fault:
            raise InvalidRequest(f"a resume would be refused: {fault}") from None
    return code


async def _resume(
    runs: Runs, run: StoredRun, backends: StoredBackends | None, options: OutputOptions, *, retry_failed: bool
) -> int:
    """Resume a run. Return the exit code."""
    prompts = repaired_prompts(run, backends) if backends is not None and retry_failed else {}
    async with runs.open(run, ResumeOptions(retry_failed, prompts=prompts)) as (continued, chosen):
        if backends is not None:
            _print_plan_changes(run, backends, prompts)
        output = replace(options, concurrency=chosen.concurrency, result_of=result_task(run.record))
        return await follow_run(continued, run.state, output, run.store)


def _print_ended(run: StoredRun, options: OutputOptions) -> int:
    """Print the result of a run that has ended, and the command that shows the run. Return the exit code."""
    result = ended_result(run)
    if options.as_json:
        print_result_json(result, Progress(run.state, time.monotonic), options.store)
    elif options.quiet:
        print_result(run.state.dag, result, result_task(run.record))
    else:
        hint = "" if result.status is RunStatus.COMPLETED else "; --retry-failed runs what failed again"
        print_note(f"run {result.run_id} is {result.status.value}, nothing is left to do{hint}")
        print_next(options.store, "show", result.run_id)
    return exit_code(result)


_NAMED = 5
_STORED_COUNTS = "a resume runs the stored plan"


def _print_plan_changes(run: StoredRun, stored: StoredBackends, taken: Collection[str] = ()) -> None:
    """Print the changes of the plan file that a resume ignores, because the stored run counts; the prompts of the tasks
    in `taken` count.
    """
    if taken:
        print_note(f"taking the prompts of {named_tasks([*taken])} from {stored.plan} for this run")
    if stored.replacements:
        print_note(f"using {', '.join(sorted(stored.replacements))} from {stored.files.backends} for this resume")
    path = stored.plan
    if path is None or not path.is_file():
        return
    try:
        tasks = [run.state.dag[task_id] for task_id in taken]
        ignored = {f"tasks.{name}.prompt" for task in tasks for name in (task.id, group_of(task.id, task.item))}
        changed = [key for key in plan_changes(run, stored, path) if key not in ignored]
    except (PlanError, InvalidRequest):
        print_note(f"the plan file has mistakes by now (`plait check` lists them); {_STORED_COUNTS}")
        return
    if changed:
        more = [f"{len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
        named = ", ".join([*changed[:_NAMED], *more])
        hint = "; --backends FILE takes backends from a file" if changed[0].startswith("backends.") else ""
        print_note(f"the plan file has changed since this run was stored ({named}); {_STORED_COUNTS}{hint}")
