"""A run executed in this process to its end: a new one, or a stored one, and on with what the store has taken."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from plait import events
from plait.clock_and_ids import new_run_id
from plait.errors import RunOwned, StoreError
from plait.events import RunClaimed
from plait.json_form import JsonInput
from plait.runner.client.cancel_run import finish_cancelling
from plait.runner.client.create_run import checked_run_id, slot_settings, with_policy
from plait.runner.domain.dag import DAG
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import Degradation, RunResult
from plait.runner.engine.lease import claim_for_this_process, short_claim_ends, wait_for_expiry
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_lifecycle import Diverged, execute_run
from plait.runner.engine.run_options import RunOptions, answer_keys, backend_names
from plait.runner.recovery.given_answers import question_of
from plait.runner.recovery.resume import ResumeOptions, decide, earlier_answers, prepare_resume
from plait.runner.reuse.earlier_answers import (
    ANSWER_KEYS,
    EarlierAnswers,
    ReuseFrom,
    load_earlier_answers,
    require_tasks,
)
from plait.runner.state.codec import run_created
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import (
    StoredRun,
    ended_result,
    needs_no_work,
    require_unfailed,
    stored_run,
    with_prompts,
)
from plait.runner.state.task_files import with_digests
from plait.statuses import RunStatus

Drive: TypeAlias = Callable[[LiveRun], Awaitable[RunResult]]
"""Executes a run; to be handed to `Run`."""
_MOST_CLAIMS = 10
"""How often a resume claims a run that other processes claim at the same time."""


def new_run(
    config: RunOptions,
    dag: DAG,
    run_id: str | None,
    settings: Mapping[str, JsonInput] | None,
    policy: Policy | None,
    reuse: ReuseFrom | None,
    known: EarlierAnswers | None = None,
) -> tuple[LiveRun, Drive]:
    """Return a new run, and what executes it. `known` are the answers that a preview has read. Raises as
    `ParallelRunner.run`.
    """
    dag = with_digests(dag)
    names = backend_names(dag, config)
    run_id = checked_run_id(run_id) or new_run_id(config.clock)
    kept = {**with_policy(config, dag, settings, policy), **slot_settings(config)}
    if config.store is not None:
        kept[ANSWER_KEYS] = answer_keys(config)
    if reuse is not None:
        require_tasks(() if reuse.roots is not None else reuse.fresh, dag.tasks)
        kept |= reuse.as_settings()

    async def drive_new(live: LiveRun) -> RunResult:
        live.answers = known
        if known is None:
            now = config.clock.wall()
            live.answers = await load_earlier_answers(config.store, dag, answer_keys(config), reuse, now)
        at = live.created_at = live.stamp()
        live.owner = claim_for_this_process(at)
        claim = RunClaimed(at, live.owner, config.clock.wall() + config.lease)
        live.first_events = run_created(at, run_id, dag, kept), events.RunStarted(at, run_id), claim
        live.state, live.task_backends = RunState(dag.copy(), keeps_all=config.store is None), names
        live.policy = policy
        return await _go_on(live, await execute_run(live))

    return LiveRun(run_id=run_id, options=config), drive_new


def stored_run_drive(
    config: RunOptions, run_id: str, how: ResumeOptions, run: StoredRun | None = None
) -> tuple[LiveRun, Drive]:
    """Return a stored run, and what begins or continues it; `run` is the run as it has been read already."""

    async def drive_stored(live: LiveRun) -> RunResult:
        return await _go_on(live, await _resume_once(live, how, run))

    return LiveRun(run_id=run_id, options=config), drive_stored


async def _go_on(live: LiveRun, outcome: RunResult | Diverged) -> RunResult:
    """Return the result of a run. If the store has refused a part of it, first continue with what is stored."""
    while isinstance(outcome, Diverged):
        interrupted = outcome.result
        try:
            outcome = await _resume_once(live, ResumeOptions(policy=live.policy))
        except StoreError as error:
            at = live.stamp()
            live.feed.publish(events.RunInterrupted(at, live.run_id, str(error)))
            degraded = (*interrupted.degraded, Degradation(at, None, str(error)))
            return replace(interrupted, degraded=degraded, error=str(error))
        if isinstance(outcome, Diverged):
            outcome = Diverged(_joined(interrupted, outcome.result))
        else:
            outcome = _joined(interrupted, outcome)
    return outcome


async def _resume_once(live: LiveRun, how: ResumeOptions, read: StoredRun | None = None) -> RunResult | Diverged:
    config, run_id = live.options, live.run_id

    async def prepared_or_result() -> RunResult | None:
        run = read if read is not None and not tries else await stored_run(config.store, run_id)
        live.feed.status = run.status
        for task_id in how.answers or ():
            question_of(run, task_id)
        if needs_no_work(run, how.retry_failed):
            if how.answers:
                require_unfailed(run)
            return ended_result(run)
        run = with_prompts(run, how.prompts)
        if not await wait_for_expiry(config, run, live):
            return run.state.result(run_id, RunStatus.INTERRUPTED)
        plan = await decide(config, run, how)
        if plan.cancelled:
            return await finish_cancelling(config, run, live.feed)
        live.answers = await earlier_answers(config, run)
        if await prepare_resume(live, plan):
            return None
        return run.state.result(run_id, run.status, resume_summary=run.state.resume_summary())

    tries = 0
    while True:
        try:
            result = await prepared_or_result()
            break
        except RunOwned:
            tries += 1
            store = config.store
            if store is None or tries == _MOST_CLAIMS or not await short_claim_ends(config, store, run_id):
                raise
    return await execute_run(live) if result is None else result


def _joined(before: RunResult, after: RunResult) -> RunResult:
    """Return the result of a run that went on in one process, which did what was done `before`."""
    reused = {one.id for one in before.tasks.values() if one.reused}
    summary = before.resume_summary
    if summary is not None and (more := after.resume_summary) is not None:
        ran, repeated = summary.ran + more.ran, summary.repeated + more.repeated
        summary = replace(summary, ran=ran, repeated=repeated, adopted=summary.adopted + more.adopted)
    return replace(
        after,
        tasks={name: replace(task, reused=name in reused) for name, task in after.tasks.items()},
        degraded=(*before.degraded, *after.degraded),
        resume_summary=summary,
    )
