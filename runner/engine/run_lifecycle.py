"""`execute_run`: from a prepared run to a result. The parts around the executor, in the order of start and end.

    writer (shielded, ends last)             Checkpointer.write_until_closed
      └─ lease renewal, the run's inbox      Checkpointer.renew_lease, Inbox.handle
           └─ execution                      Executor.run

The writer starts first: a new run is stored and claimed before anything else happens, and if the store refuses the
run, nothing is executed. A resumed run was claimed by `prepare_resume`. Then the orphans of earlier owners are ended,
and only afterwards do the lease renewal, the inbox and the execution begin.

The end starts inside. However the execution ends, `Executor.finish` returns the events of the attempts that were cut,
and the run's last event. All are submitted, lease renewal and inbox are cancelled, and `close` lets the writer return
after the remaining changes are written. The writer's scope is shielded, so the release of a cancelled run is still
stored. A fatal error of the writer (see `Checkpointer`) stops the execution as `stop` does, and is raised once the
writer has ended.

A run without a store has no writer, no lease and no inbox: `UnstoredSink` publishes each event at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import anyio

from plait import events
from plait.clock_and_ids import iso, stamper
from plait.errors import BackendError, Conflict, ErrorKind, Fenced, OwnershipLost, RunExists, StoreError
from plait.events import Owner, RunReleased
from plait.failpoints import reached
from plait.persistence.store_protocol import Store, files_root
from plait.program_log import logger
from plait.runner.asyncio_cancellation import require_asyncio
from plait.runner.domain.continuation import History
from plait.runner.domain.policy import Policy
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.attempt import RunContext
from plait.runner.engine.cancelled_sessions import note_cancelled
from plait.runner.engine.checkpointer import Checkpointer, EventSink, UnstoredSink, WritePosition
from plait.runner.engine.event_feed import Feed
from plait.runner.engine.executor import Executor
from plait.runner.engine.growth import Growth
from plait.runner.engine.handover import NO_HANDOVER, Handover
from plait.runner.engine.inbox import Inbox
from plait.runner.engine.lease import unregister
from plait.runner.engine.outcomes import STORE_WAITS_S
from plait.runner.engine.policy_driver import PolicyDriver, PolicyState
from plait.runner.engine.run_control import Control
from plait.runner.engine.run_hosts import (
    away_reporter,
    connected_hosts,
    follow_slots,
    remove_files_on_hosts,
    run_on_hosts,
)
from plait.runner.engine.run_options import Config
from plait.runner.reuse.earlier_answers import EarlierAnswers
from plait.runner.scheduling.scheduler import InitialState, Scheduler
from plait.runner.scheduling.slots import Pause
from plait.runner.state.attempt_files import kill_orphans
from plait.runner.state.run_state import THROTTLING, RunState
from plait.runner.state.stored_conversations import load_history
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import failed_status


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready for execution."""

    run_id: str
    state: RunState
    task_backends: list[str]
    """The backend of each task, by position."""
    owner: Owner | None = None
    """The claim of this process; None without a store."""
    first_events: Sequence[events.Event] = ()
    """Events to store before any task starts, with the claim. For a resumed run they are stored already, and only
    published.
    """
    position: WritePosition = WritePosition()  # noqa: RUF009 - frozen
    """The position of the next change in the store."""
    policy: Policy | None = None
    policy_state: PolicyState = PolicyState()  # noqa: RUF009 - frozen
    """The outcome of the policy's decisions so far."""
    handover: Handover = NO_HANDOVER
    """The unfinished work of earlier processes."""

    answers: EarlierAnswers | None = None
    """The answers of earlier runs that this run may take over."""
    created_at: str = ""
    """The time at which the run was created, as stored."""

    @property
    def resumed(self) -> bool:
        return self.position.next_seq > 1


@dataclass(frozen=True, slots=True)
class Diverged:
    """The outcome of an execution that got ahead of what is stored, because the store refused results for good.

    In the store their tasks have failed, and the run still belongs to this process. It goes on from there, as in a
    resume.
    """

    result: RunResult
    """The result if the run cannot go on, as interrupted."""


async def execute_run(run: PreparedRun, config: Config, feed: Feed, control: Control) -> RunResult | Diverged:
    """Execute `run` to its end in this process. Raise as `ParallelRunner.run`."""
    require_asyncio()
    try:
        if config.store is None:
            sink = UnstoredSink(feed)
            sink.submit(run.first_events)
            return await _execute(run, config, _context(run, config, sink, feed), control, _nothing)
        return await _execute_stored(run, config, config.store, feed, control)
    finally:
        if run.owner is not None:
            unregister(run.owner)


async def _execute_stored(
    run: PreparedRun, config: Config, store: Store, feed: Feed, control: Control
) -> RunResult | Diverged:
    control.on_late_end = None
    checkpointer = Checkpointer(store, run.run_id, feed, config.clock, config.strict)
    assert run.owner is not None
    checkpointer.begin_at(run.position)
    checkpointer.on_fatal = lambda: control.end("stop")
    checkpointer.requires_start = control.requires_record
    checkpointer.status_of_failure = lambda task_id: failed_status(run.state.dag[task_id].failure_mode)
    inbox = Inbox(store, run.run_id, config.clock, lambda: checkpointer.away, control.answer)
    checkpointer.on_gap = inbox.read_again
    context = replace(_context(run, config, checkpointer, feed), look_for_answer=inbox.look_for_answer)
    result: RunResult | None = None
    began = False
    async with anyio.create_task_group() as outside:
        outside.start_soon(_write, checkpointer)
        try:
            if run.position.next_seq == 1:
                await checkpointer.submit(run.first_events).wait()
            else:
                for event in run.first_events:
                    feed.publish(event)
            if checkpointer.fatal is None:
                await _kill_orphans(run, config, kept=run.handover.adopted)
                began = True
                async with anyio.create_task_group() as beside:
                    beside.start_soon(checkpointer.renew_lease, config.lease)
                    beside.start_soon(_handle_notes, inbox, run.owner, control)
                    result = await _execute(
                        run, config, context, control, partial(_end_interrupted, run, config, checkpointer)
                    )
                    beside.cancel_scope.cancel()
        finally:
            # However the run ended: without `close` the shielded writer waits for ever.
            try:
                if not began:
                    checkpointer.submit([RunReleased(iso(config.clock.wall()))])
            finally:
                checkpointer.close()
                control.on_late_end = checkpointer.end_wait
    await _raise_if_fatal(run.run_id, store, checkpointer)
    assert result is not None
    result = replace(result, degraded=tuple(checkpointer.degraded))
    if result.status is RunStatus.CANCELLED:
        return result
    if checkpointer.goes_on:
        return Diverged(replace(result, status=RunStatus.INTERRUPTED))
    if checkpointer.loss is not None:
        return replace(result, status=RunStatus.INTERRUPTED, error=checkpointer.loss)
    return result


async def _write(checkpointer: Checkpointer) -> None:
    """Write until closed. A cancellation of the run ends the wait for a store that is away at the end."""
    async with anyio.create_task_group() as beside:
        beside.start_soon(_end_wait_if_cancelled, checkpointer)
        await checkpointer.write_until_closed()
        beside.cancel_scope.cancel()


async def _end_wait_if_cancelled(checkpointer: Checkpointer) -> None:
    try:
        await anyio.sleep_forever()
    finally:  # at the end of the writer the call has no effect
        checkpointer.end_wait()


async def _handle_notes(inbox: Inbox, owner: Owner, control: Control) -> None:
    """Pass on answers, and a request to cancel the run."""
    await inbox.handle(owner)
    control.cancel()


async def _end_after_grace(config: Config, control: Control) -> None:
    """Once the run is cancelled, cancel the attempts still under way after the grace time."""
    await control.cancelled()
    await config.clock.sleep(config.cancel_grace)
    control.end("cancel")


async def _raise_if_fatal(run_id: str, store: Store, checkpointer: Checkpointer) -> None:
    error = checkpointer.fatal
    if isinstance(error, Fenced):
        raise OwnershipLost(
            f"run {run_id} was taken over by another process; this process stopped ({error})"
        ) from error
    if isinstance(error, Conflict) and not checkpointer.began and await store.get_run(run_id) is not None:
        raise RunExists(f"the store already has a run {run_id!r}; resume it, or give another run id") from error
    if error is not None:
        raise error


def _context(run: PreparedRun, config: Config, sink: EventSink, feed: Feed) -> RunContext:
    return RunContext(
        run.run_id,
        config.backends,
        run.task_backends,
        sink,
        feed,
        config.clock,
        config.rng,
        config.on_question,
        run.handover,
        partial(_recall, config, run.run_id, run.state),
        files_root(config.store),
        prices=config.prices,
        answers=run.answers,
    )


def _scheduler(run: PreparedRun, config: Config) -> Scheduler:
    return Scheduler(
        run.state.dag,
        run.task_backends,
        config.slot_pool(),
        InitialState(
            run.state.statuses,
            later=run.handover.next_tries.keys(),
            throttled=_throttled(run),
            held=run.handover.adopted.keys(),
        ),
    )


async def _execute(
    run: PreparedRun, config: Config, context: RunContext, control: Control, end_cut: Callable[[], Awaitable[None]]
) -> RunResult:
    scheduler = _scheduler(run, config)
    stamp = stamper(config.clock)
    growth = Growth(
        run.state,
        scheduler,
        run.task_backends,
        backends=config.backends,
        default=config.default,
        limits=config.growth.within(run.state.dag.growth),
        stamp=stamp,
    )
    policy_driver = None
    if run.policy is not None:
        policy_driver = PolicyDriver(
            run.policy, run.policy_state, state=run.state, scheduler=scheduler, growth=growth, stamp=stamp
        )
    executor = Executor(run.state, scheduler, growth, context, policy_driver)
    control.attach(executor.end, executor.wind_down, executor.answer)
    context.sink.on_refused = executor.settle
    last_events: list[events.Event] = []
    sessions: dict[int, str] = {}
    try:
        claim = run_on_hosts(run.run_id, run.created_at, run.position.epoch, _adopted_on_hosts(run))
        claim = replace(claim, on_away=away_reporter(context.sink, stamp))
        async with connected_hosts(config.backends.values(), claim) as connections, anyio.create_task_group() as beside:
            beside.start_soon(_end_after_grace, config, control)
            if config.concurrency is None:
                beside.start_soon(follow_slots, connections, executor.widen)
            await executor.run()
            beside.cancel_scope.cancel()
            if _is_over(run, executor) and not context.sink.away:
                remove_files_on_hosts(connections)
    finally:
        scheduler.release_all()
        try:
            await end_cut()
        finally:
            sessions = {position: one.session_id for position, one in run.state.continuations.items() if one.session_id}
            last_events = executor.finish()
            context.sink.submit(last_events)
            reached("run.ended")
    last = last_events[-1]
    assert isinstance(last, events.RunEnded)
    if last.status is RunStatus.CANCELLED:
        await note_cancelled(config, run.run_id, run.state, sessions)
    summary = run.state.resume_summary() if run.resumed else None
    return run.state.result(run.run_id, last.status, last.error, summary)


def _is_over(run: PreparedRun, executor: Executor) -> bool:
    """Return whether no later owner collects the answer of an attempt."""
    if executor.ended_by == "refusal":
        return False
    return executor.ended_by == "cancel" or all(status in TASK_DONE for status in run.state.statuses)


def _throttled(run: PreparedRun) -> dict[int, Pause]:
    """Return the pause of each pending task whose last attempt was throttled in an earlier process."""
    times, statuses = run.handover.next_tries, run.state.statuses
    return {
        i: Pause(times.get(i, 0.0), record.error_kind or "", probe=True)
        for i, record in enumerate(run.state.records)
        if record.error_kind in THROTTLING and statuses[i] is TaskStatus.PENDING
    }


def _adopted_on_hosts(run: PreparedRun) -> Iterator[tuple[str, str, int]]:
    """Yield the host, the task id and the number of each adopted attempt on another host."""
    for position, attempt in run.handover.adopted.items():
        if attempt.detached.place is not None:
            yield attempt.detached.place, run.state.dag.tasks[position].id, run.state.attempts[position]


async def _nothing() -> None:
    return None


async def _end_interrupted(run: PreparedRun, config: Config, checkpointer: Checkpointer) -> None:
    """End the adopted attempts that were cut here, perhaps before the backends had attached to the attempts. Do nothing
    if another owner has taken the run over, because the attempts then belong to the new owner.
    """
    cut = any(run.state.statuses[position] is TaskStatus.RUNNING for position in run.handover.adopted)
    if cut and checkpointer.fatal is None:
        with anyio.CancelScope(shield=True):
            await _kill_orphans(run, config)


async def _kill_orphans(run: PreparedRun, config: Config, kept: Iterable[int] = ()) -> None:
    """End the orphans of earlier processes of a resumed run, except the attempts of the tasks at `kept`."""
    if run.resumed:
        keep = [(run.state.dag.tasks[position].id, run.state.attempts[position]) for position in kept]
        await kill_orphans(config.store, run.run_id, keep)


async def _recall(config: Config, run_id: str, state: RunState, task_id: str) -> History:
    """Read a conversation that is no longer in memory. While the store does not answer, wait, and try again for the
    time of STORE_WAITS_S. Raises BackendError (transient) afterwards.
    """
    if config.store is None:
        return History()
    waits = iter(STORE_WAITS_S)
    while True:
        try:
            history = await load_history(config.store, run_id, state, task_id)
        except (StoreError, BackendError) as error:
            wait = next(waits, None)
            logger(run=run_id).warning("conversation_not_read", task=task_id, error=str(error), next_try_in_s=wait)
            if wait is None:
                problem = f"the conversation of task {task_id!r} cannot be read: {error}"
                raise BackendError(ErrorKind.TRANSIENT, problem) from error
        else:
            return replace(history, session_id=state.results[state.dag.position(task_id)].session_id)
        await config.clock.sleep(wait)
