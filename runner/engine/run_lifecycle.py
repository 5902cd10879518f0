"""`execute_run`: from a prepared run to a result. The parts around the executor, in the order of start and end.

    writer (shielded, ends last)             Checkpointer.write_until_closed
      └─ lease renewal, the run's inbox      lease.renew, Inbox.handle
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

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

import anyio

from plait import events
from plait.backends.backend_protocol import Backend, HostConnections, PlacedBackend, RunOnHosts
from plait.clock_and_ids import iso
from plait.errors import Conflict, Fenced, OwnershipLost, RunExists
from plait.events import RunReleased
from plait.failpoints import reached
from plait.persistence.store_protocol import Store
from plait.program_log import logger
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.checkpointer import Checkpointer, UnstoredSink
from plait.runner.engine.executor import Executor
from plait.runner.engine.inbox import Inbox
from plait.runner.engine.lease import renew, unregister
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import RunOptions
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.attempt_files import hosts_key, kill_orphans
from plait.runner.state.run_state import RunState
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import failed_status


async def execute_run(run: LiveRun) -> RunResult:
    """Execute `run`, which is prepared, to its end in this process, or until it restarts from what is stored
    (`LiveRun.restarts`). Raise as `ParallelRunner.run`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # stores and backends do not support trio
        raise RuntimeError("plait needs asyncio's event loop: asyncio.run(main()), or anyio.run(main)") from None
    try:
        if (store := run.options.store) is not None:
            if not run.notify:
                return await _execute_stored(run, store)
            from plait.runner.engine.notices import sending_notices  # noqa: PLC0415 - few runs need the HTTP client

            async with sending_notices(run, store):
                return await _execute_stored(run, store)
        run.sink = UnstoredSink(run.feed.publish)
        run.sink.submit(run.first_events)
        return await _execute(run)
    finally:
        if run.owner is not None:
            unregister(run.owner)


async def _execute_stored(run: LiveRun, store: Store) -> RunResult:
    options = run.options
    run.sink = checkpointer = Checkpointer(store, run.run_id, run.feed.publish, options.clock, options.strict)
    run.on_late_end = None
    assert run.owner is not None
    checkpointer.begin_at(run.position)
    checkpointer.on_fatal = lambda: run.end("stop")
    checkpointer.requires_start = run.requires_record
    checkpointer.status_of_failure = lambda task_id: failed_status(run.state.dag[task_id].failure_mode)
    inbox = Inbox(run, store)
    run.look_for_answer = inbox.look_for_answer
    checkpointer.on_gap = inbox.read_again
    result: RunResult | None = None
    began = False
    async with anyio.create_task_group() as outside:
        outside.start_soon(_write, checkpointer)
        try:
            if run.resumed:
                for event in run.first_events:
                    run.feed.publish(event)
            else:
                await checkpointer.submit(run.first_events).wait()
            run.first_events = ()  # they hold the whole DAG once more
            if checkpointer.fatal is None:
                await _kill_orphans(run, spared=run.adopted)
                began = True
                async with anyio.create_task_group() as beside:
                    beside.start_soon(renew, checkpointer, options.lease, options.clock)
                    beside.start_soon(_handle_notes, inbox, run)
                    result = await _execute(run, checkpointer)
                    beside.cancel_scope.cancel()
        finally:
            # However the run ended: without `close` the shielded writer waits for ever.
            try:
                if not began:
                    checkpointer.submit([RunReleased(iso(options.clock.wall()))])
            finally:
                checkpointer.close()
                run.on_late_end = checkpointer.end_wait
    await _raise_if_fatal(run.run_id, store, checkpointer)
    assert result is not None
    result = replace(result, degraded=tuple(checkpointer.degraded))
    if result.status is RunStatus.CANCELLED:
        return result
    if checkpointer.restarts:
        run.execution, run.restarts = None, True
        return replace(result, status=RunStatus.INTERRUPTED)
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


async def _handle_notes(inbox: Inbox, run: LiveRun) -> None:
    """Pass on answers, and a request to cancel the run."""
    assert run.owner is not None
    await inbox.handle(run.owner)
    run.cancel()


async def _end_after_grace(run: LiveRun) -> None:
    """Once the run is cancelled, cancel the attempts still under way after the grace time."""
    await run.cancelled.wait()
    await run.options.clock.sleep(run.options.cancel_grace)
    run.end("cancel")


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


async def _execute(run: LiveRun, checkpointer: Checkpointer | None = None) -> RunResult:
    state, options = run.state, run.options
    run.scheduler = Scheduler(
        state.dag,
        run.task_backends,
        options.slot_pool(),
        statuses=state.statuses,
        later=run.next_tries.keys(),
        held=run.adopted.keys(),
        spares=options.spares,
        moved=state.moved,
        priority=run.priority,
        looks_first=run.answers is not None,
    )
    for name, (until, cause) in run.closed.items():
        run.scheduler.close(name, until, cause)
    if run.tuning.changes:
        run.scheduler.tune(run.tuning)
    executor = Executor(run)
    run.execute_by(executor)
    run.sink.on_refused = executor.settle
    last_events: list[events.Event] = []
    sessions: dict[int, str] = {}
    try:
        connected: AbstractAsyncContextManager[Sequence[HostConnections]] = nullcontext(())
        if any(isinstance(backend, PlacedBackend) for backend in options.backends.values()):
            claim = run_on_hosts(run.run_id, run.created_at, run.position.epoch, _adopted_on_hosts(run))
            claim = replace(claim, on_away=partial(_report_away, run))
            connected = connected_hosts(options.backends.values(), claim)
        async with connected as connections, anyio.create_task_group() as beside:
            beside.start_soon(_end_after_grace, run)
            if options.concurrency is None:
                beside.start_soon(follow_slots, connections, executor.widen)
            await executor.run()
            beside.cancel_scope.cancel()
            if connections and _is_over(run, executor) and not run.sink.away:
                remove_files_on_hosts(connections)
    finally:
        run.scheduler.release_all()
        try:
            if checkpointer is not None:
                await _end_interrupted(run, checkpointer)
        finally:
            sessions = {
                position: continuation.session_id
                for position, continuation in state.continuations.items()
                if continuation.session_id
            }
            last_events = executor.finish()
            run.sink.submit(last_events)
            reached("run.ended")
    last = last_events[-1]
    assert isinstance(last, events.RunEnded)
    if last.status is RunStatus.CANCELLED:
        await note_cancelled(options, run.run_id, state, sessions)
    summary = state.resume_summary() if run.resumed else None
    result = state.result(run.run_id, last.status, last.error, summary)
    return replace(result, due_at=last.until) if isinstance(last, events.RunParked) else result


def _is_over(run: LiveRun, executor: Executor) -> bool:
    """Return whether no later owner collects the answer of an attempt."""
    if executor.ended_by == "refusal":
        return False
    return executor.ended_by == "cancel" or all(status in TASK_DONE for status in run.state.statuses)


def _report_away(run: LiveRun, host: str, since: float | None, reason: str, tasks: tuple[str, ...]) -> None:
    """Make the event of a host that attempts wait for, or no longer wait for."""
    run.sink.submit([events.HostAway(run.stamp(), host, None if since is None else iso(since), reason, tasks)])


def _adopted_on_hosts(run: LiveRun) -> Iterator[tuple[str, str, int]]:
    """Yield the host, the task id and the number of each adopted attempt on another host."""
    for position, turn in run.adopted.items():
        if turn.place is not None:
            yield turn.place, run.state.dag.tasks[position].id, run.state.attempts[position]


async def _end_interrupted(run: LiveRun, checkpointer: Checkpointer) -> None:
    """End the adopted attempts that were cut here, perhaps before the backends had attached to the attempts. Do nothing
    if another owner has taken the run over, because the attempts then belong to the new owner.
    """
    cut = any(run.state.statuses[position] is TaskStatus.RUNNING for position in run.adopted)
    if cut and checkpointer.fatal is None:
        with anyio.CancelScope(shield=True):
            await _kill_orphans(run)


async def _kill_orphans(run: LiveRun, spared: Iterable[int] = ()) -> None:
    """End the orphans of earlier processes of a resumed run, except the attempts of the tasks at `spared`."""
    if run.resumed:
        keep = [(run.state.dag.tasks[position].id, run.state.attempts[position]) for position in spared]
        await kill_orphans(run.options.store, run.run_id, keep)


_SESSIONS_S = 5.0
"""Seconds for all sessions of a run: a store of sessions that hangs does not hold up a cancellation for longer."""


async def note_cancelled(options: RunOptions, run_id: str, state: RunState, sessions: Mapping[int, str]) -> None:
    """Note in the `sessions` of tasks, by position, that the run was cancelled, where a backend's session holds the
    status of its run. An error is logged, and changes nothing else: the record of the run counts.
    """
    with anyio.move_on_after(_SESSIONS_S) as limit:
        for position, session_id in sessions.items():
            task = state.dag.tasks[position]
            backend = options.backends.get(state.backend_of(position, options.default))
            note: Callable[[str], Awaitable[None]] | None = getattr(backend, "note_cancelled", None)
            if note is None:
                continue
            try:
                await note(session_id)
            except Exception as error:
                logger(run=run_id).warning("session_not_updated", task=task.id, error=type(error).__name__)
    if limit.cancelled_caught:
        logger(run=run_id).warning("sessions_not_updated", why=f"no answer within {_SESSIONS_S:g} s")


# The connections of a run to the hosts of its backends, for as long as this process owns the run.


def run_on_hosts(run_id: str, created_at: str, epoch: int, adopted: Iterable[tuple[str, str, int]] = ()) -> RunOnHosts:
    """Return a run and its owner's claim as hosts read them.

    The hosts keep the attempts in `adopted`, each a host, a task id and a number, and end all others of the run.
    """
    attempts: dict[str, list[str]] = {}
    for place, task_id, attempt in adopted:
        attempts.setdefault(place, []).append(f"{task_id}/{attempt}")
    return RunOnHosts(run_id, hosts_key(run_id, created_at), max(1, epoch), attempts)


@asynccontextmanager
async def connected_hosts(backends: Iterable[Backend], run: RunOnHosts) -> AsyncGenerator[Sequence[HostConnections]]:
    """Connect the hosts of all `backends` that place attempts on other hosts. Leaving disconnects the hosts."""
    every = {id(backend.hosts): backend.hosts for backend in backends if isinstance(backend, PlacedBackend)}
    if not every:
        yield ()
        return
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(hosts.connected(run)) for hosts in every.values()]


async def follow_slots(connections: Sequence[HostConnections], on_slots: Callable[[int], None]) -> None:
    """Call `on_slots` with the number of slots of all hosts, whenever it grows. Runs until it is cancelled."""
    slots = [0] * len(connections)

    async def follow(index: int, hosts: HostConnections) -> None:
        while True:
            slots[index] = await hosts.more_slots(slots[index])
            on_slots(sum(slots))

    async with anyio.create_task_group() as group:
        for index, hosts in enumerate(connections):
            group.start_soon(follow, index, hosts)


def remove_files_on_hosts(connections: Iterable[HostConnections]) -> None:
    """Ask the hosts to remove the files of the run, which is over."""
    for hosts in connections:
        hosts.remove_files()


async def end_on_hosts(
    backends: Iterable[Backend], run: RunOnHosts, placed: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """End all attempts of a cancelled run, and remove its files, on all hosts of `backends` that can be reached.

    `placed` names the tasks whose attempts may be under way, for each host that had attempts. Return the part of the
    other hosts, which is logged as well.
    """
    if not placed:
        return {}
    async with connected_hosts(backends, run) as connections:
        reached = await _reached(connections)
        remove_files_on_hosts(connections)
    missing = {host: tasks for host, tasks in placed.items() if tasks and host not in reached}
    if missing:
        logger(run=run.run_id).warning("attempts_not_ended", hosts=list(missing), why="the hosts cannot be reached")
    return missing


async def _reached(connections: Iterable[HostConnections]) -> Collection[str]:
    """Return the names of the hosts that are connected, of all groups, which are waited for at once."""
    names: set[str] = set()

    async def add(hosts: HostConnections) -> None:
        names.update(await hosts.reached())

    async with anyio.create_task_group() as group:
        for connection in connections:
            group.start_soon(add, connection)
    return names
