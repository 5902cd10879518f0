"""Resume of a stored run: taken over from a dead owner, its interrupted attempts settled, the conversations that tasks
continue loaded; executed, and on with what the store has taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

import anyio.to_thread

from plait import events
from plait.backends.backend_protocol import DetachedTurn
from plait.clock_and_ids import iso, parse_time
from plait.errors import (
    BackendError,
    ErrorKind,
    InvalidRequest,
    PlaitError,
    PolicyMissing,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    StoreError,
)
from plait.events import TASK_RESULTS
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.domain.asked_question import Way
from plait.runner.domain.continuation import Continuation, History
from plait.runner.domain.dag import RowsFile
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import Degradation, RunResult
from plait.runner.domain.run_tuning import Tuning
from plait.runner.engine.lease import (
    acquire,
    owner_is_gone,
    shown_status,
    unregister,
    wait_for_expiry,
)
from plait.runner.engine.live_run import Feed, LiveRun, Run
from plait.runner.engine.retries import LONG_S
from plait.runner.engine.run_lifecycle import end_on_hosts, execute_run, note_cancelled, run_on_hosts
from plait.runner.engine.run_options import RunOptions, answer_keys, backend_names, require_policy_backends
from plait.runner.policies import policy_of
from plait.runner.recovery.resume_plan import (
    RUNS,
    ResumeAction,
    ResumeOptions,
    ResumePlan,
    ResumeStep,
    deaths_with,
    decide,
    longest_delay,
    needs_correction,
    outlives,
    question_of,
)
from plait.runner.reuse.earlier_answers import REUSE, EarlierAnswers, ReuseFrom, has_taken_all, load_earlier_answers
from plait.runner.state.attempt_files import kill_orphans
from plait.runner.state.budget import BUDGET, Budget, raise_of, stored_budget
from plait.runner.state.stored_conversations import load_answered_messages, load_continuation, load_history
from plait.runner.state.stored_run import (
    MOST_RUNS_SEARCHED,
    PRIORITY,
    StoredPolicy,
    StoredRun,
    ended_result,
    events_after,
    needs_no_work,
    read_policy_state,
    read_settings,
    require_unfailed,
    stored_events,
    stored_run,
    stored_targets,
    stores_backends,
    unfinished_on_hosts,
    with_prompts,
)
from plait.statuses import RESUMABLE, RUN_DONE, TASK_DONE, RunStatus, TaskStatus
from plait.task import Task
from plait.usage import NO_USAGE

_MOST_CLAIMS = 10
"""How often a resume claims a run to which other processes write answers at the same time."""


def require_unchanged(file: RowsFile) -> None:
    """Raise RunNotResumable if the rows of the run are not those that they were when the run was made."""
    from plait.runner.plan.plan_inputs import has_changed  # noqa: PLC0415 - pydantic, for such runs only

    try:
        why = "has changed since the run was made" if has_changed(file) else None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    if why is not None:
        raise RunNotResumable(f"the run reads its rows from {file.path}, which {why}; put the file back")


OnUnreached: TypeAlias = Callable[[Mapping[str, Sequence[str]]], None]
"""Called with the hosts that cannot be reached, and the ids of the tasks that may be under way on each."""


async def find_newest_resumable(store: Store, *, retry_failed: bool) -> RunRecord:
    """Return the newest run that `plait resume` can continue. Raises InvalidRequest without one, StoreError."""
    wanted = RESUMABLE | {RunStatus.FAILED} if retry_failed else RESUMABLE
    refused: RunRecord | None = None
    for run in await store.list_runs(MOST_RUNS_SEARCHED):
        if not run.damaged and shown_status(run) in wanted:
            record = await store.get_run(run.run_id)
            if record is not None and stores_backends(record):
                return record
            refused = refused or record
    if refused is not None:  # `resume` prints the reason
        return refused
    kinds = "queued, interrupted, parked" + (
        ", waiting for a person or failed" if retry_failed else " or waiting for a person"
    )
    hint = "" if retry_failed else " (--retry-failed includes failed runs)"
    raise InvalidRequest(f"nothing to resume: no run in the store is {kinds}{hint}; `plait runs` lists all runs")


def continued_run(config: RunOptions, run_id: str, how: ResumeOptions, run: StoredRun | None = None) -> Run:
    """Return a stored run, to begin or to continue; `run` is the run as it has been read already."""

    async def drive(live: LiveRun) -> RunResult:
        return await finish_restarts(live, await _resume_once(live, how, run))

    return Run(LiveRun(run_id=run_id, options=config, parks=config.park or how.wakes, wakes=how.wakes), drive)


async def finish_restarts(live: LiveRun, result: RunResult) -> RunResult:
    """Return the result of a run. If the store has refused a part of it, first restart from what is stored."""
    while live.restarts:
        live.restarts, interrupted = False, result
        try:
            result = _joined(interrupted, await _resume_once(live, ResumeOptions(policy=live.policy), None))
        except StoreError as error:
            at = live.stamp()
            live.feed.publish(events.RunInterrupted(at, live.run_id, str(error)))
            degraded = (*interrupted.degraded, Degradation(at, None, str(error)))
            return replace(interrupted, degraded=degraded, error=str(error))
    return result


async def _resume_once(live: LiveRun, how: ResumeOptions, run: StoredRun | None) -> RunResult:
    result: RunResult | None = None
    for tries in range(1, _MOST_CLAIMS + 1):
        try:
            result = await _prepared_or_result(live, how, run or await stored_run(live.options.store, live.run_id))
            break
        except RunOwned:
            assert live.options.store is not None
            run, now = None, await live.options.store.get_run(live.run_id)
            if tries == _MOST_CLAIMS or now is None or not owner_is_gone(now):
                raise
    return await execute_run(live) if result is None else result


async def _prepared_or_result(live: LiveRun, how: ResumeOptions, run: StoredRun) -> RunResult | None:
    """Prepare `live` for execution, and return None; or return the result of a run in which there is nothing to do."""
    config, run_id = live.options, live.run_id
    live.feed.status = run.status
    for task_id in how.answers or ():
        question_of(run, task_id)
    if needs_no_work(run, how.retry_failed):
        if how.answers:
            require_unfailed(run)
        return ended_result(run)
    if (file := run.state.dag.rows_file) is not None:
        await anyio.to_thread.run_sync(require_unchanged, file)
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


async def finish_cancelling(
    config: RunOptions, run: StoredRun, feed: Feed, on_unreached: OnUnreached = lambda _hosts: None
) -> RunResult:
    """Cancel all unfinished tasks of a run without an owner in a single transaction: claim, cancel, release.

    Raises RunOwned if another process has just claimed the run, StoreError.
    """
    state, record = run.state, run.record
    at = iso(config.clock.wall())
    new_events: list[events.Event] = []
    sessions: dict[int, str] = {}
    for position, status in enumerate(state.statuses):
        if status not in TASK_DONE:
            new_events.append(state.cancel(position, at))
            if session_id := run.tasks[position].session_id:
                sessions[position] = session_id
    new_events.append(events.RunCancelled(at, record.run_id))
    owner, written = await acquire(config, run.store, record, new_events)
    unregister(owner)
    await kill_orphans(run.store, record.run_id)
    await end_run_on_hosts(config, record, written.epoch, on_unreached)
    await note_cancelled(config, record.run_id, state, sessions)
    for event in new_events:
        feed.publish(event)
    return state.result(record.run_id, RunStatus.CANCELLED, resume_summary=state.resume_summary())


async def end_run_on_hosts(config: RunOptions, record: RunRecord, epoch: int, on_unreached: OnUnreached) -> None:
    """End what a cancelled run without an owner still has on other hosts. Raises StoreError."""
    assert config.store is not None
    placed = await unfinished_on_hosts(config.store, record.run_id)
    claim = run_on_hosts(record.run_id, record.created_at, epoch)
    if missing := await end_on_hosts(config.backends.values(), claim, placed):
        on_unreached(missing)


async def prepare_resume(live: LiveRun, plan: ResumePlan) -> bool:
    """Claim the run of `plan` and prepare `live` for execution, in one transaction. Return False, and store nothing,
    if the run waits for a person, the resume brings nothing new, and nobody has ended the run.

    Raises RunOwned if another process claims the run first or has changed it, BackendMissing, PolicyMissing, PlaitError
    for a surplus policy, StoreError.
    """
    options, run, state = live.options, plan.run, plan.run.state
    record, settings, decided = run.record, read_settings(run.record), plan.decided
    at = iso(options.clock.wall())
    live.policy = policy = _policy(run, plan.how.policy)

    # What the plan says of each task.
    new_events, raises, delays = _settle_tasks(plan, at, options.rng)
    budget = await _budget(options, run, raises, at)
    new_events += raises
    is_unchanged = not new_events
    state.mark_repeats(position for position, step in enumerate(plan.steps) if step.possibly_billed_twice)

    # What the run works with: refused before anything is stored if something is missing.
    names = backend_names(state.dag, options, state.statuses)
    unfinished = [position for position, status in enumerate(state.statuses) if status not in TASK_DONE]
    tasks = [state.dag.tasks[position] for position in unfinished]
    unpriced = options.unpriced or settings.get(BUDGET, {}).get("unpriced", False)
    await live.take_budget(budget, tasks, [names[position] for position in unfinished], unpriced=unpriced)
    if policy is not None:
        require_policy_backends(options, policy)

    # Conversations, and the agents that outlived their runner. All other attempts under way have been cut.
    adopted = await _load_conversations(run, plan.steps)
    if budget is not None:
        for task_id in [*budget.reserved]:
            if state.dag.position(task_id) not in adopted:
                budget.settle(task_id, NO_USAGE, is_cut=True)
    for position in adopted:
        task, backend = run.tasks[position], state.backend_of(position, options.default)
        new_events.append(events.TaskAdopted(at, task.task_id, task.attempt, backend, task.session_id))
    await _load_failures(run)

    backlog = [] if policy is None else await _policy_backlog(run, new_events)
    works = (options.on_question is not None and state.asking) or any(step.action in RUNS for step in plan.steps)
    waits = run.status is RunStatus.WAITING_INPUT and TaskStatus.WAITING_INPUT in state.statuses
    if waits and is_unchanged and live.ended_by is None and not (adopted or backlog or works):
        return False
    if not backlog and decided != read_policy_state(record.policy_state):
        # With a backlog, the first decision stores the reopened state. Otherwise the state is stored here; without
        # the event, a second resume would read the old end of the run again.
        new_events.append(events.PolicyDecided(at, decided.encoded()))
    if decided.failed_on is not None and decided.end is None:
        backlog.insert(0, decided.failed_on)
    stored_tunings, new_tunings = await _tunings(live, run, at)
    new_events += new_tunings
    closed = await _closed_backends(run, options.backends, parse_time(at))

    begins: events.Event = events.RunStarted(at, record.run_id)
    if run.status is not RunStatus.QUEUED:
        reused = sum(status is TaskStatus.COMPLETED for status in state.statuses)
        begins = events.RunResumed(at, record.run_id, run.status, reused)
    new_events.insert(0, begins)
    # Nothing is awaited after the claim: a cancellation would leave the run with this owner.
    live.owner, live.position = await acquire(options, run.store, record, new_events)
    # Stored already, and news to the listeners of this process.
    new_events += stored_tunings
    new_events += [_waits(run, position, until, at) for position, until in plan.later.items()]
    live.state, live.task_backends, live.created_at = state, names, record.created_at
    live.policy_state, live.policy_backlog = decided, backlog
    live.notify = stored_targets(record)
    live.priority = settings.get(PRIORITY, 0) if options.priority is None else options.priority
    live.next_tries, live.adopted, live.closed = {**plan.later, **delays}, adopted, closed
    live.first_events = new_events
    return True


def _settle_tasks(
    plan: ResumePlan, at: str, rng: random.Random
) -> tuple[list[events.Event], list[events.BudgetRaised], dict[int, float]]:
    """Change the state of each task as `plan` says: give it its answer, end its attempt, or run it again. Return the
    events, the budgets that answers raise, and the Unix times of attempts that start after a delay, by position.
    """
    run, state = plan.run, plan.run.state
    new_events: list[events.Event] = []
    raises: list[events.BudgetRaised] = []
    delays: dict[int, float] = {}
    for position, step in enumerate(plan.steps):
        event: events.Event | None
        if step.action is ResumeAction.ADOPT:
            continue
        if answer := plan.answers.get(step.task_id):
            raises += raise_of(state.asking[position], step.task_id, answer.value, at)
            event = state.answer(position, at, answer.value, answer.by)
        elif state.statuses[position] is TaskStatus.RUNNING:
            event = _end_attempt(plan, position, step, at, rng)
            if isinstance(event, events.TaskInterrupted) and step.action in RUNS:
                delays[position] = parse_time(at) + event.delay_s
        else:
            event = _apply_step(run, position, step, at, plan.how.prompts.get(step.task_id))
        if event is not None:
            new_events += [*(_session_event(run, position, at) if run.detached else ()), event]
    return new_events, raises, delays


async def _tunings(
    live: LiveRun, run: StoredRun, at: str
) -> tuple[Sequence[events.RunTuned], Sequence[events.RunTuned]]:
    """Let `live` run as persons have tuned it by notes. Return the tunings that are stored as events, and the new ones.
    Raises StoreError.
    """
    if notes := await run.store.list_notes(run.record.run_id) if run.status in RUN_DONE else run.notes:
        live.tuning = Tuning.of(notes)
    if not live.tuning.changes:
        return (), ()
    events_of_tuning = stored_events(run.store, run.record.run_id, events.RunTuned)
    news = live.tuning.news_since(Tuning().after([one async for one in events_of_tuning]))
    stored = [one for one in live.tuning.in_force if one not in news]
    return stored, [replace(one, at=at) for one in news]


async def _closed_backends(run: StoredRun, backends: Container[str], now: float) -> dict[str, tuple[float | None, str]]:
    """Return which of the backends a limit has closed for long, by the last event of each: see `LiveRun.closed`. Raises
    StoreError.
    """
    ours = {events.OWN_LIMITS, events.USD_PER_DAY}
    throttled = stored_events(run.store, run.record.run_id, events.BackendThrottled)
    last = {one.backend: one async for one in throttled if one.cause not in ours}
    ends = {name: (parse_time(one.until), one) for name, one in last.items() if one.until}
    return {
        name: (until if until > now else None, one.cause)
        for name, (until, one) in ends.items()
        if name in backends and until - parse_time(one.at) > LONG_S
    }


async def _budget(options: RunOptions, run: StoredRun, raises: list[events.BudgetRaised], at: str) -> Budget | None:
    """Return the budget of the run, with `raises` and, if it is higher, with the one of `options`, which is added to
    `raises`. None without a limit. Raises StoreError.
    """
    settings, limit = read_settings(run.record), options.budget
    budget = await stored_budget(run.store, run.record.run_id, settings, run.state.dag, is_limited=limit is not None)
    if budget is None:
        return None
    for raised in raises:
        budget.set_limit(raised)
    if limit is not None and (budget.usd == inf or limit > budget.usd):
        raises.append(events.BudgetRaised(at, limit))
        budget.set_limit(raises[-1])
    return budget


async def earlier_answers(options: RunOptions, run: StoredRun) -> EarlierAnswers | None:
    """Return the answers that the run may take over; those of an earlier run that is deleted are missing.

    Raises RunNotResumable for a fork that may not have taken over all kept results, if the earlier run is deleted.
    """
    settings, dag, now = read_settings(run.record), run.state.dag, options.clock.wall()
    if REUSE not in settings and not dag.caches:
        return None
    reuse = ReuseFrom.of_settings(settings)
    try:
        return await load_earlier_answers(options.store, dag, answer_keys(options), reuse, now)
    except RunNotFound:
        assert reuse is not None
        is_plain = StoredPolicy.of(run.record) is None
        if reuse.roots is not None and not (is_plain and has_taken_all(run.state, reuse)):
            raise RunNotResumable(
                f"run {run.record.run_id} was made from run {reuse.like}, which is deleted, and may not have taken "
                f"over all the results that it keeps; start a new run"
            ) from None
        return await load_earlier_answers(options.store, dag, answer_keys(options), None, now) if dag.caches else None


def _policy(run: StoredRun, own: Policy | None) -> Policy | None:
    stored = StoredPolicy.of(run.record)
    run_id = run.record.run_id
    if stored is None:
        if own is not None:
            raise PlaitError(f"run {run_id} was started without a policy and cannot be given one; leave the policy out")
        return None
    if own is not None and own.kind != stored.kind:
        raise PolicyMissing(f"run {run_id} was started with a policy of kind {stored.kind!r}, not {own.kind!r}")
    return own or policy_of(stored.kind, stored.settings)


async def _policy_backlog(run: StoredRun, new_events: Sequence[events.Event]) -> list[str]:
    """Return the ids of the tasks that ended after the last question to the policy; tasks in `new_events` come last."""
    later_events = events_after(run.store, run.record.run_id, run.record.policy_seq)
    ended = {one.task_id: None async for one in later_events if one.kind in TASK_RESULTS and one.task_id is not None}
    ended |= {event.task_id: None for event in new_events if isinstance(event, events.TaskFailed)}
    return [task_id for task_id in ended if run.state.statuses[run.state.dag.position(task_id)] in TASK_DONE]


def _end_attempt(plan: ResumePlan, position: int, step: ResumeStep, at: str, rng: random.Random) -> events.Event:
    """End the attempt under way, as `step` says, and return the event."""
    run = plan.run
    if step.action is ResumeAction.ASK:
        return run.state.wait_for_decision(position, at, step.reason, crashed=plan.died)
    if not plan.died:
        return run.state.interrupt(position, at, "the process lost the run")
    delay_s = rng.uniform(0, longest_delay(deaths_with(run.tasks[position])))
    return run.state.interrupt(position, at, "the process ended", crashed=True, delay_s=delay_s)


def _apply_step(run: StoredRun, position: int, step: ResumeStep, at: str, prompt: str | None) -> events.Event | None:
    """Apply `step` to the state of the task, `prompt` being the new prompt, if any. Return the event of the change, or
    None without a change.
    """
    state = run.state
    if step.action is ResumeAction.FAIL:
        return state.fail(position, at, BackendError(ErrorKind.TIMEOUT, step.reason))
    if step.action is ResumeAction.START_OVER and state.statuses[position] is TaskStatus.FAILED:
        return state.reopen(position, at, prompt=prompt)
    return None


async def _load_conversations(run: StoredRun, steps: Sequence[ResumeStep]) -> dict[int, DetachedTurn]:
    """Load the conversations that unfinished tasks continue, both own conversations and conversations of other tasks.
    Return the adopted attempts by position. Raises StoreError.
    """
    state, adopted = run.state, dict[int, DetachedTurn]()
    for position, (task, step) in enumerate(zip(state.dag, steps, strict=True)):
        if state.statuses[position] in TASK_DONE:
            continue
        if task.continues is not None:
            before = state.dag.position(task.continues)
            if state.statuses[before] is TaskStatus.COMPLETED and not state.keeps_conversation(before):
                history = await load_history(run.store, run.record.run_id, state, task.continues)
                state.keep_conversation(before, History(run.tasks[before].session_id, history.messages))
        if step.action is ResumeAction.ADOPT:
            record = state.records[position]
            adopted[position] = turn = run.detached[task.id]
            # Where the attempt began, so that no message is sent twice.
            interrupted = turn.resumes_interrupted
            began = await load_continuation(run.store, run.record.run_id, state, record, interrupted=interrupted)
            if interrupted or began.sends_message:
                state.continue_with(position, began)
        elif step.action in RUNS:
            await _load_own(run, position, step)
        elif position in state.asking and state.asking[position].way is not Way.REPLY:
            await _load_own(run, position, step)  # an answer may arrive during execution
        elif position in state.asking:
            record = run.tasks[position]
            messages = await load_answered_messages(run.store, run.record.run_id, state, record.task_id, record.attempt)
            state.continue_with(position, Continuation(record.session_id, messages))
    return adopted


async def _load_own(run: StoredRun, position: int, step: ResumeStep) -> None:
    """Load the conversation of the task's earlier attempts if the next attempt continues the conversation."""
    state, record = run.state, run.tasks[position]
    answer = state.answer_to_send(position)
    says_answer = answer is not None and answer.attempt == record.attempt
    interrupted = step.action is ResumeAction.CONTINUE and not says_answer and not needs_correction(record)
    may_correct = _may_correct(state.dag.tasks[position], record, step)
    if record.session_id is None and answer is None and not may_correct:
        return
    if interrupted or answer is not None or may_correct:
        continuation = await load_continuation(run.store, run.record.run_id, state, record, interrupted=interrupted)
        if interrupted or continuation.sends_message:
            state.continue_with(position, continuation)


def _may_correct(task: Task, record: TaskRecord, step: ResumeStep) -> bool:
    """Return whether the next prompt may be the reason for which an answer was refused: invalid tasks, or a failed
    check. The reason was never sent, or the attempt with the reason was interrupted early or failed.
    """
    if not (task.adds_tasks or task.check) or TaskStatus(record.status) not in {TaskStatus.PENDING, TaskStatus.RUNNING}:
        return False
    if needs_correction(record):
        return step.action is ResumeAction.CONTINUE
    return step.action is not ResumeAction.CONTINUE and not record.session_confirmed


def _waits(run: StoredRun, position: int, until: float, at: str) -> events.TaskEvent:
    """Return the event for listeners of this process: the end of the last attempt, as stored. Not stored again."""
    record, continues = run.tasks[position], position in run.state.continuations
    kind, error, delay_s = record.error_kind, record.error or "", until - parse_time(at)
    if kind is None:
        return events.TaskInterrupted(at, record.task_id, record.attempt, error, crashed=True, delay_s=delay_s)
    return events.TaskRetried(
        at,
        record.task_id,
        attempt=record.attempt,
        error_kind=kind,
        error=error,
        delay_s=delay_s,
        duration_s=record.duration_s or 0.0,
        continues_session=continues,
    )


async def _load_failures(run: StoredRun) -> None:
    """Count the failed attempts of earlier processes in the state. Raises StoreError."""
    for position, record in enumerate(run.tasks):
        if record.attempt and run.state.statuses[position] not in TASK_DONE:
            attempts = await run.store.list_attempts(run.record.run_id, record.task_id)
            run.state.count_stored_failures(position, attempts)


def _session_event(run: StoredRun, position: int, at: str) -> list[events.Event]:
    """Return the event that stores the session of an interrupted attempt if only the files name the session."""
    stored = run.state.records[position]
    detached = run.detached.get(stored.task_id)
    if detached is None or outlives(detached) or detached.session_id is None:
        return []
    if stored.session_confirmed and stored.session_id == detached.session_id:
        return []
    return [events.SessionOpened(at, stored.task_id, stored.attempt, detached.session_id)]
