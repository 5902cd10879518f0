"""Continuation of a task's conversation by a person after the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from plait.backends.backend_protocol import (
    Abilities,
    Attachment,
    Backend,
    ConversationRequest,
    DetachedBackend,
    PlacedBackend,
    Placement,
    Reply,
)
from plait.clock_and_ids import iso, traceparent
from plait.errors import BackendError, PlaitError, TurnNotStored
from plait.events import Event, MessageAppended, RunReleased, SessionOpened
from plait.persistence.store_records import TaskRecord
from plait.runner.engine.attempt import options_for
from plait.runner.engine.backend_call import call_backend
from plait.runner.engine.call_costs import CallCosts
from plait.runner.engine.checkpointer import Checkpointer
from plait.runner.engine.lease import acquire, due_at, renew, unregister, wait_for_expiry
from plait.runner.engine.run_lifecycle import connected_hosts, remove_files_on_hosts, run_on_hosts
from plait.runner.engine.run_options import RunOptions, require_backends
from plait.runner.state.attempt_files import attempt_files, files_root, kill_orphans, under_way
from plait.runner.state.stored_conversations import load_history
from plait.runner.state.stored_run import StoredRun, placed_attempts, stored_events
from plait.runner.state.task_files import read_contents, sends_files
from plait.safe_text import clean_text
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import Task

_PERSON = 0
"""The attempt number of turns outside any attempt: see MessageAppended."""


async def continue_task(config: RunOptions, run: StoredRun, task_id: str, message: str) -> Reply:
    """Send a person's message. The claim on the run excludes concurrent messages. See
    `Runs.continue_task`.
    """
    dag, run_id = run.state.dag, run.record.run_id
    run.require_task(task_id)
    task, message = dag[task_id], clean_text(message)
    name = run.state.backend_of(dag.position(task_id), config.default)
    require_backends(config, {name}, f"task {task_id!r}")
    await wait_for_expiry(config, run)
    if dag.position(task_id) in run.state.asking:
        raise PlaitError(
            f"task {task_id!r} of run {run_id} waits for an answer to its question; answer the question first"
        )
    if dag.position(task_id) in run.state.moved:
        own = config.backends.get(dag.backend_of(task) or config.default)
        task = replace(task, model=options_for(task, own, config.backends[name]).model)
    request = await _conversation_request(run, task, config.backends[name])
    owner, position = await acquire(config, run.store, run.record, ())
    checkpointer = Checkpointer(run.store, run_id, lambda _event: None, config.clock, config.strict)
    checkpointer.begin_at(position)
    checkpointer.end_wait()  # the caller gets the reply at once, with TurnNotStored
    turns: list[Event] = []
    reply: Reply | None = None
    failure: BackendError | PlaitError | None = None
    async with anyio.create_task_group() as outside:
        outside.start_soon(checkpointer.write_until_closed)
        try:
            async with anyio.create_task_group() as beside:
                beside.start_soon(renew, checkpointer, config.lease, config.clock)
                await kill_orphans(run.store, run_id, under_way(run.tasks))
                async with _connected(run, config.backends[name], position.epoch):
                    outcome = await call_backend(config.backends[name], request, message)
                costs = CallCosts(config)
                outcome = await costs.priced(outcome, name, task.model)
                reply, failure = outcome.reply, outcome.error
                if outcome.asked is not None:
                    failure = PlaitError(
                        f"the backend asks {outcome.asked.text[:200]!r} instead of answering; only a task of a "
                        f"running run can wait for an answer"
                    )
                beside.cancel_scope.cancel()
            if reply is not None:
                at = iso(config.clock.wall())
                turns += (MessageAppended(at, task.id, _PERSON, one) for one in reply.turn(message))
                if reply.session_id is not None and reply.session_id != request.session_id:
                    turns.append(SessionOpened(at, task.id, _PERSON, reply.session_id))
        finally:
            unregister(owner)
            checkpointer.submit([*turns, RunReleased(iso(config.clock.wall()), due_at(run.record))])
            checkpointer.close()
    if failure is not None:
        raise failure
    assert reply is not None
    lost = next((one.error for one in checkpointer.degraded if one.lost), None)
    if (reason := checkpointer.fatal or lost) is not None:
        raise TurnNotStored(f"the reply arrived, but could not be stored: {reason}", reply.text)
    return reply


@asynccontextmanager
async def _connected(run: StoredRun, backend: Backend, epoch: int) -> AsyncGenerator[None]:
    """Connect the hosts of `backend`, which keep the attempts that a resume may adopt. Raises StoreError."""
    adopted: list[tuple[str, str, int]] = []
    if isinstance(backend, PlacedBackend):
        places = await placed_attempts(run.store, run.record.run_id)
        adopted = [(places[one].place, *one) for one in under_way(run.tasks) if one in places]
    claim = run_on_hosts(run.record.run_id, run.record.created_at, epoch, adopted)
    async with connected_hosts([backend], claim) as connections:
        yield
        if all(status in TASK_DONE for status in run.state.statuses):
            remove_files_on_hosts(connections)


async def _stored_nowhere(_place: str) -> None:
    """Return at once: the place of a person's turn needs no record, because no other process follows the turn."""


async def _conversation_request(run: StoredRun, task: Task, backend: Backend) -> ConversationRequest:
    run_id, position = run.record.run_id, run.state.dag.position(task.id)
    root = files_root(run.store) if isinstance(backend, DetachedBackend) else None
    past = await load_history(run.store, run_id, run.state, task.id, persons=True)
    session_id = run.tasks[position].session_id
    if session_id is None or not await _holds_an_answer(run, run.tasks[position]):
        status = run.state.statuses[position]
        why = "it has no reply yet"
        if status is TaskStatus.COMPLETED:
            why = "the backend stores none; a function never has one"
        raise PlaitError(f"task {task.id!r} of run {run_id} is {status.value}, with no conversation to continue: {why}")
    attachments: tuple[Attachment, ...] = ()
    if Abilities.of(backend).takes_files == "contents" and sends_files(task, run.state.dag):
        _, attachments = await read_contents(task, run.state.dag)
    number = f"{_PERSON}-{run.record.last_seq}"
    placement = None
    if isinstance(backend, PlacedBackend):
        placement = Placement(run_id, task.id, number, _stored_nowhere, lambda: None, lambda: None)
    return ConversationRequest(
        session_id=session_id,
        resume=True,
        history=past.messages,
        # Unlike a repeated attempt, each message is a new request.
        idempotency_key=f"{run_id}:{task.id}:{run.record.last_seq}",
        metadata=task.metadata,
        files=None if root is None else attempt_files(root, run_id, task.id, number),
        timeout=task.timeout,
        traceparent=traceparent(run_id, task.id),  # no attempt has a span for a person's turn
        options=task.options,
        placement=placement,
        workspace=run.state.texts(task).workspace(),
        attachments=attachments,
    )


async def _holds_an_answer(run: StoredRun, task: TaskRecord) -> bool:
    """Return whether the conversation contains an answer, or the backend confirmed the session and holds the only
    copy.
    """
    run_id, task_id = run.record.run_id, task.task_id
    if task.session_confirmed:
        return True
    if any(
        message.role == "assistant" and message.attempt for message in await run.store.list_messages(run_id, task_id)
    ):
        return True
    # A failed attempt is no longer marked as confirmed, since no attempt continues it; the agent's work is still in the
    # session.
    attempts = await run.store.list_attempts(run_id, task_id)
    theirs = {_PERSON, *(one.attempt for one in attempts if one.session_id == task.session_id)}
    opened = stored_events(run.store, run_id, SessionOpened)
    return any([one.task_id == task_id and one.attempt in theirs async for one in opened])
