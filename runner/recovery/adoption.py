"""Adoption of attempts that outlived the process that started the attempts.

The backend reads the state of an attempt from the files of the attempt alone (`DetachedBackend.inspect`). An attempt
that is still running, or has ended without a stored end, continues in this process with the same number. Files of an
interrupted attempt may name a session that the dead process had not stored yet; the session then counts as stored.

An attempt on another host is not asked about here: the host may be away, and would answer only to the next owner. Such
an attempt is adopted, and its host then says whether it is still there. The host refuses the earlier owner from then
on, so an owner that is only suspended can do no harm to the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anyio.to_thread import run_sync

from plait import events
from plait.backends.backend_protocol import DetachedBackend, DetachedTurn, Files, PlacedBackend
from plait.clock_and_ids import parse_time
from plait.persistence.store_records import TaskRecord
from plait.program_log import logger
from plait.runner.engine.lease import owner_is_gone
from plait.runner.engine.live_run import AdoptedAttempt
from plait.runner.engine.run_options import RunOptions
from plait.runner.recovery.resume_plan import outlives
from plait.runner.state.attempt_files import attempt_files, files_root
from plait.runner.state.stored_conversations import load_continuation
from plait.runner.state.stored_run import StoredRun, placed_attempts
from plait.statuses import TASK_STATUSES, TaskStatus


async def with_detached_turns(options: RunOptions, run: StoredRun) -> StoredRun:
    """Return `run` with the states of the running attempts in `detached`, read from files. No living owner exists."""
    turns: dict[str, tuple[DetachedBackend, Files]] = {}
    root = files_root(run.store)
    for position, (task, record) in enumerate(zip(run.state.dag, run.tasks, strict=True)):
        if root is not None and TASK_STATUSES[record.status] is TaskStatus.RUNNING and not task.gathers:
            backend = options.backends.get(run.state.backend_of(position, options.default))
            if isinstance(backend, DetachedBackend):
                turns[task.id] = backend, attempt_files(root, run.record.run_id, task.id, record.attempt)
    placed = await _placed_turns(options, run)
    if not turns and not placed:
        return run
    detached = await run_sync(_inspect, turns)
    if not owner_is_gone(run.record):
        # The owner may only be suspended, and ends its child processes after waking up: do not adopt running attempts.
        # The sessions and replies in the files are valid all the same.
        detached = {
            task_id: replace(turn, state="dead") if turn.state == "alive" else turn
            for task_id, turn in detached.items()
        }
    detached |= placed
    return replace(
        run, tasks=tuple(_with_session(record, detached.get(record.task_id)) for record in run.tasks), detached=detached
    )


async def _placed_turns(options: RunOptions, run: StoredRun) -> dict[str, DetachedTurn]:
    """Return the running attempts that were placed on another host, as alive: their hosts have not been asked. An
    attempt without a stored place has not begun. Raises StoreError.
    """
    running: dict[str, int] = {}
    for position, (task, record) in enumerate(zip(run.state.dag, run.tasks, strict=True)):
        backend = options.backends.get(run.state.backend_of(position, options.default))
        if TASK_STATUSES[record.status] is TaskStatus.RUNNING and isinstance(backend, PlacedBackend):
            running[task.id] = record.attempt
    if not running:
        return {}
    places = await placed_attempts(run.store, run.record.run_id)
    return {
        task_id: DetachedTurn("alive", None, placed.interrupted, f"on {placed.place}", placed.place)
        for task_id, attempt in running.items()
        if (placed := places.get((task_id, attempt))) is not None
    }


def _inspect(turns: Mapping[str, tuple[DetachedBackend, Files]]) -> dict[str, DetachedTurn]:
    states: dict[str, DetachedTurn] = {}
    for task_id, (backend, files) in turns.items():
        try:
            detached = backend.inspect(files)
        except Exception as error:
            logger(task=task_id).warning("left_failed", error=type(error).__name__)
            continue
        if detached is not None:
            states[task_id] = detached
    return states


def _with_session(record: TaskRecord, detached: DetachedTurn | None) -> TaskRecord:
    if detached is None or detached.session_id is None:
        return record
    return replace(record, session_id=detached.session_id, session_confirmed=True)


def session_event(run: StoredRun, position: int, at: str) -> list[events.Event]:
    """Return the event that stores the session of an interrupted attempt if only the files name the session."""
    stored = run.state.records[position]
    detached = run.detached.get(stored.task_id)
    if detached is None or outlives(detached) or detached.session_id is None:
        return []
    if stored.session_confirmed and stored.session_id == detached.session_id:
        return []
    return [events.SessionOpened(at, stored.task_id, stored.attempt, detached.session_id)]


async def adopted_attempt(run: StoredRun, position: int) -> AdoptedAttempt:
    """Return the attempt for adoption, and put the state where the attempt began, so that no message is sent twice.
    Raises StoreError.
    """
    run_id, state, stored = run.record.run_id, run.state, run.state.records[position]
    detached = run.detached[stored.task_id]
    continuation = await load_continuation(run.store, run_id, state, stored, interrupted=detached.resumes_interrupted)
    if detached.resumes_interrupted or continuation.sends_message:
        state.continue_with(position, continuation)
    since = None if stored.started_at is None else parse_time(stored.started_at)
    return AdoptedAttempt(stored.session_id, stored.session_confirmed, since, detached)
