"""`run`, `resume` and `continue`, once their options are read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.persistence import SQLiteStore, StoreError
from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner import PlaitError, Plan
from plait.runner.cli.backends import Backing, names_needed
from plait.runner.cli.commands.dry_run import tell_preview
from plait.runner.cli.display import report
from plait.runner.cli.display.follow import Ending, follow
from plait.runner.cli.display.plain import Display, NoDisplay, PlainDisplay
from plait.runner.cli.display.progress import Progress
from plait.runner.cli.display.text import visible, without_controls
from plait.runner.cli.exits import COMPLETED, Fault, output, say, tell
from plait.runner.cli.knowing import knowing_runner
from plait.runner.cli.lookup import (
    find_run,
    find_task,
    newest_resumable,
    say_if_watched,
    store_for_going_on,
    store_for_reading,
)
from plait.runner.cli.options import plait
from plait.runner.cli.plan_changes import say_if_edited
from plait.runner.cli.stored_backends import Files, Kept
from plait.runner.cli.waiting import Waiting, waiting_in
from plait.runner.domain.dag import DAG
from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.operations.inspect import usage_value
from plait.runner.policies import policy_of
from plait.runner.policies.orchestrator.policy import OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID
from plait.runner.recovery.resume_plan import RUNS, Action, judge
from plait.runner.run import Run
from plait.runner.state.codec import dag_of
from plait.runner.state.stored_run import StoredPolicy, has_ended

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Manner:
    """How a person wants it: where it is stored (None: nowhere), how much is said, how much runs at once, and the task
    whose result is that of the run (None: the final ones).
    """

    store: Path | None
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    logs: bool = False
    concurrency: int | None = None
    result_of: str | None = None


async def run_plan(plan: Plan, backing: Backing, manner: Manner) -> int:
    """Run `plan`; the exit code."""
    names = names_needed(plan.dag, backing.default, policy=plan.policy, known=backing.specs)
    store = None if manner.store is None else SQLiteStore(manner.store)
    # The store is opened last: a missing backend must not leave an empty store behind.
    async with backing.running(names) as made, store or nullcontext():
        concurrency = manner.concurrency or plan.concurrency or DEFAULT_CONCURRENCY
        runner = backing.runner(made, store=store, concurrency=concurrency)
        run = runner.start(plan.dag, settings=backing.settings(), policy=plan.policy)
        return await see_through(run, plan.dag, manner, store)


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


async def see_through(
    run: Run, dag: DAG, manner: Manner, store: Store | None, statuses: Mapping[str, TaskStatus] | None = None
) -> int:
    """Show `run` to its end and say what it came to; the exit code. `store` is where the run is stored."""
    ending = await follow(run, dag, _display(dag, manner, statuses))
    result = ending.result
    try:
        if manner.as_json:
            report.tell_json(ending, manner.store)
        else:
            report.tell_result(ending.dag, result, manner.result_of)
    finally:  # a result that cannot be written is to be found
        if not manner.quiet:
            report.say_summary(ending, manner.store, await _waiting(result, store))
        elif result.status is not RunStatus.COMPLETED:
            report.say_failure(result)
    return report.exit_code(result)


async def _waiting(result: RunResult, store: Store | None) -> list[Waiting]:
    """What the run's tasks wait for, as far as the store has it."""
    if store is None or not result.waiting:
        return []
    try:
        return await waiting_in(store, result.run_id)
    except (StoreError, PlaitError):  # it is away; the run's own record still has the questions
        return []


def _display(dag: DAG, manner: Manner, statuses: Mapping[str, TaskStatus] | None) -> Display:
    if manner.quiet:
        return NoDisplay()
    # Log lines and a live display would write over each other.
    if manner.logs or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(verbose=manner.verbose)
    from plait.runner.cli.display.live import LiveDisplay  # noqa: PLC0415 - rich takes a while and is not needed in a pipe

    return LiveDisplay(Progress(dag, time.monotonic, statuses), dag.name or "plait", verbose=manner.verbose)


async def continue_task(word: str, task_id: str, message: str, files: Files, manner: Manner) -> int:
    """Say `message` in a task's conversation; the exit code."""
    assert manner.store is not None
    async with store_for_going_on(manner.store) as store:
        record = await find_run(store, word)
        await find_task(store, record, task_id)
        say_if_watched(record)
        dag = dag_of(record, await store.list_tasks(record.run_id))
        kept = Kept.of(record, files)
        names = [dag.backend_of(dag[task_id]) or kept.default]
        backing = kept.backing(names)
        async with backing.running(names) as made:
            reply = await backing.runner(made, store=store).continue_task(record.run_id, task_id, message)
    if manner.as_json:
        value: dict[str, Any] = {
            "run_id": record.run_id,
            "task_id": task_id,
            "text": reply.text,
            "session_id": reply.session_id,
            **usage_value(reply.usage),
        }
        report.tell_value(value)
    else:
        fit = visible if output().isatty() else without_controls
        tell(fit(reply.text).removesuffix("\n"))
    return COMPLETED
