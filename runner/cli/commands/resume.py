"""`plait resume`: go on with a stored run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import click

from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import Backing, names_needed
from plait.runner.cli.commands.dry_run import tell_preview
from plait.runner.cli.display import report
from plait.runner.cli.display.follow import see_through
from plait.runner.cli.display.report import Ending
from plait.runner.cli.exits import Fault, prints_aside, say
from plait.runner.cli.lookup import (
    find_run,
    newest_resumable,
    say_if_watched,
    store_for_going_on,
    store_for_reading,
)
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    Manner,
    backends_option,
    concurrency_option,
    configure_log,
    json_option,
    log_options,
    plait,
    plan_option,
    quiet_option,
    store_option,
    verbose_option,
)
from plait.runner.cli.plan_changes import say_if_edited
from plait.runner.cli.stored_backends import Files, Kept, knowing_runner
from plait.runner.domain.dag import DAG
from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.policies import policy_of
from plait.runner.policies.orchestrator.policy import OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID
from plait.runner.recovery.resume_plan import RUNS, Action, judge
from plait.runner.state.codec import dag_of
from plait.runner.state.stored_run import StoredPolicy, has_ended


@click.command("resume")
@click.argument("run", required=False)
@click.option("--retry-failed", is_flag=True, help="Run failed tasks again, and those whose stored result is damaged.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done with each task, and why.")
@plan_option
@backends_option
@concurrency_option
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def resume_command(run: str | None, retry_failed: bool, **options: Any) -> int:
    """Go on with RUN: a run's id, its beginning, or `last`. Without it, the newest run that can be resumed.

    What is completed is kept; what was under way or never began is run. A conversation that was cut goes on where its
    backend is known to have it.
    """
    configure_log(options["log_style"], options["log_level"])
    wanted = Resumption(run, retry_failed, Files(options["plan"], options["backends"]), options["dry_run"])
    with prints_aside():
        return anyio.run(resume_run, wanted, Manner.of(options))


@dataclass(frozen=True, slots=True)
class Resumption:
    """What is to be resumed: a run's id (None: the newest that can be), and how."""

    run: str | None
    retry_failed: bool = False
    files: Files = Files()  # noqa: RUF009 - frozen
    dry_run: bool = False


async def resume_run(wanted: Resumption, manner: Manner) -> int:
    """Go on with a run; the exit code."""
    assert manner.store is not None
    open_store = store_for_reading if wanted.dry_run else store_for_going_on
    async with open_store(manner.store) as store:
        if wanted.run is None:
            record = await newest_resumable(store, wanted.retry_failed)
        else:
            record = await find_run(store, wanted.run)
        tasks = await store.list_tasks(record.run_id)
        dag = dag_of(record, tasks)
        led_by = StoredPolicy.of(record)
        if led_by is not None and led_by.kind == OrchestratorPolicy.kind:
            manner = replace(manner, result_of=ANSWER_ID)
        looking = Backing({}).runner({}, store=store)
        if wanted.dry_run:
            say_if_watched(record)
            async with knowing_runner(store, record, tasks, wanted.files) as knowing:
                preview = await knowing.preview_resume(record.run_id, retry_failed=wanted.retry_failed)
            code = tell_preview(preview, manner.as_json)
            if not preview.ended and not await is_to_be_cancelled(store, record):
                try:
                    kept = Kept.of(record, wanted.files)
                    _needed(record, dag, tasks, kept, retry_failed=wanted.retry_failed)
                    say_if_edited(record, tasks, kept)
                except Fault as fault:
                    raise Fault(fault.message, fault.code, "plait: a resume would be refused: ") from None
            return code
        if has_ended(record, tasks, wanted.retry_failed):
            return _say_over(await looking.resume(record.run_id), dag, manner)
        if await is_to_be_cancelled(store, record):  # which needs no backend
            return await see_through(looking.start_resume(record.run_id), dag, manner, store)
        kept = Kept.of(record, wanted.files)
        backing, names, statuses = _needed(record, dag, tasks, kept, retry_failed=wanted.retry_failed)
        say_if_edited(record, tasks, kept)
        async with backing.running(names) as made:
            concurrency = manner.concurrency or _stored_concurrency(record)
            runner = backing.runner(made, store=store, concurrency=concurrency)
            run = runner.start_resume(record.run_id, retry_failed=wanted.retry_failed)
            return await see_through(run, dag, manner, store, statuses)


def _needed(
    record: RunRecord, dag: DAG, tasks: Sequence[TaskRecord], kept: Kept, *, retry_failed: bool
) -> tuple[Backing, list[str], dict[str, TaskStatus]]:
    """The backends that the run needs to go on, their names, and where its tasks stand then. Raises Fault."""
    verdicts = judge(dag, tasks, retry_failed=retry_failed)
    statuses = {task.task_id: _status(verdict.action, task) for task, verdict in zip(tasks, verdicts, strict=True)}
    led_by = StoredPolicy.of(record)
    policy = None if led_by is None else policy_of(led_by.kind, led_by.settings)
    names = names_needed(dag, kept.default, statuses.values(), policy=policy, known=kept.specs)
    return kept.backing(names), names, statuses


def _status(action: Action, task: TaskRecord) -> TaskStatus:
    """Where a task stands once the run goes on. Of one under way, which only its backend may know, events tell."""
    if TaskStatus(task.status) is TaskStatus.RUNNING:
        return TaskStatus.RUNNING
    if action in RUNS or action is Action.BLOCKED:
        return TaskStatus.PENDING
    if action is Action.FAIL or task.damaged:
        return TaskStatus.FAILED
    return TaskStatus.WAITING_INPUT if action is Action.ASK else TaskStatus(task.status)


def _stored_concurrency(record: RunRecord) -> int:
    stored = json.loads(record.settings).get("concurrency")
    return stored if isinstance(stored, int) and stored > 0 else DEFAULT_CONCURRENCY


def _say_over(result: RunResult, dag: DAG, manner: Manner) -> int:
    """The answer to `resume` for a run that has ended: where to see it."""
    if manner.as_json:
        report.tell_json(Ending(result, dag), manner.store)
    elif manner.quiet:
        report.tell_result(dag, result, manner.result_of)
    else:
        hint = "" if result.status is RunStatus.COMPLETED else "; --retry-failed runs what failed again"
        say(f"run {result.run_id} is {result.status.value}, nothing is left to do{hint}")
        say(f"  {'show':<9} {plait(manner.store, 'show', result.run_id)}")
    return report.exit_code(result)
