"""Conversations of tasks read back from the store, continued conversations included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from plait.dialogue import Message, Role
from plait.errors import BackendError, ErrorKind, PlaitError
from plait.events import TaskCompleted, TaskStarted
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import THOUGHTS, AttemptRecord, MessageRecord, TaskRecord
from plait.runner.domain.continuation import Continuation, History, correction_prompt, is_refusal
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import StoredRun, events_after
from plait.safe_text import clean_text
from plait.statuses import AttemptStatus
from plait.usage import Usage


async def load_history(store: Store, run_id: str, state: RunState, task_id: str, *, persons: bool = False) -> History:
    """Return the messages of the continued tasks and of `task_id`, oldest first, without a session id.

    A task that did not complete has no conversation to continue: a task that continues the incomplete task began a new
    conversation. Of the attempts of a task only the last attempt counts, and the attempts that ended with an answered
    question; an interrupted turn does not count. Turns added by a person after the run belong to a single task: tasks
    that continue the conversation do not include the added turns, and for `task_id` the added turns are read with
    `persons` only. Conversations kept in memory by `state` are not read again.

    Raises StoreError; PlaitError if a message is damaged; BackendError of kind transient if `state` belongs to a live
    run and the store lacks the last messages.
    """
    links, messages = [task_id], list[Message]()
    while (before := await _continued_task(store, run_id, state, links[-1])) is not None:
        conversation = state.conversation(before)
        if conversation is not None:
            messages += conversation.messages
            break
        links.append(before)
    for link in reversed(links):
        messages += await own_messages(store, run_id, state, link, persons=persons and link == task_id)
    return History(None, tuple(messages))


async def own_messages(
    store: Store, run_id: str, state: RunState, task_id: str, *, persons: bool = False
) -> list[Message]:
    """Return the messages of `task_id` without the conversation that the task continues. Raises as `load_history`."""
    stored = await store.list_messages(run_id, task_id)
    _require_last_messages(state, task_id, stored)
    counted = {max((record.attempt for record in stored), default=0), *state.asked_in(task_id)}
    if persons:
        counted.add(0)
    own = [record for record in stored if record.attempt in counted]
    while own and own[-1].role != "assistant":
        own.pop()
    return _messages(run_id, own)


async def sent_prompt(run: StoredRun, position: int) -> str:
    """Return the prompt that the completed task sent. The prompt of a task with files is read back from the store,
    because the files may have changed. Raises StoreError.
    """
    state, task = run.state, run.state.dag.tasks[position]
    if task.files:
        stored = await run.store.list_messages(run.record.run_id, task.id)
        for one in stored:
            if one.role == "user" and one.attempt == state.attempts[position] and not one.damaged:
                return one.content
    return clean_text(state.texts(task).prompt())


async def _continued_task(store: Store, run_id: str, state: RunState, task_id: str) -> str | None:
    """Return the task with the conversation that `task_id` continued or will continue; None for a new conversation."""
    task = state.dag[task_id]
    before = task.continues
    # A task with for_each has no conversation; only the parts have.
    if before is None or task.gathers or not state.is_completed(before):
        return None
    position, other = state.dag.position(task_id), state.dag.position(before)
    if position >= len(state.records) or state.is_ours(position):
        return before  # the dependency ended before the task begins, in the same process
    its, earlier = state.records[position], state.records[other]
    # The other task may have been reopened by a person and completed only afterwards.
    if its.attempt == 0 or its.session_id == state.results[other].session_id:
        return before
    if state.is_ours(other):
        return None
    if (earlier.ended_at or "") <= (its.started_at or ""):
        return before
    # Clocks may jump, sequence numbers do not.
    return before if await _began_after(store, run_id, its, before) else None


async def _began_after(store: Store, run_id: str, its: TaskRecord, other: str) -> bool:
    """Return whether the last attempt of a task began after the last completion of `other`."""
    began = ended = 0
    async for event in events_after(store, run_id):
        if event.kind == TaskStarted.kind and (event.task_id, event.attempt) == (its.task_id, its.attempt):
            began = event.seq
        elif event.kind == TaskCompleted.kind and event.task_id == other:
            ended = event.seq
    return began > ended


def _require_last_messages(state: RunState, task_id: str, stored: Sequence[MessageRecord]) -> None:
    """Raise BackendError if this process completed the task and the messages of the last attempt are not stored yet."""
    position = state.dag.position(task_id)
    if not state.is_ours(position) or state.dag.tasks[position].gathers:
        return  # a task that only gathers has no messages
    if all(record.attempt != state.attempts[position] for record in stored):
        message = f"the conversation of task {task_id!r} is not in the store yet: the store does not answer, or is late"
        raise BackendError(ErrorKind.TRANSIENT, message)


async def load_answered_messages(
    store: Store, run_id: str, state: RunState, task_id: str, open_in: int | None = None
) -> tuple[Message, ...]:
    """Return the messages of `task_id` up to the last answered question, or up to the question open since attempt
    `open_in`. Messages of continued tasks are not included. Raises StoreError; PlaitError if a message is damaged.
    """
    attempts = state.asked_in(task_id) | ({open_in} if open_in is not None else set[int]())
    stored = await store.list_messages(run_id, task_id)
    return tuple(_messages(run_id, (record for record in stored if record.attempt in attempts)))


async def load_continuation(
    store: Store, run_id: str, state: RunState, task: TaskRecord, *, interrupted: bool
) -> Continuation:
    """Return how the next attempt of `task` continues the conversation of earlier attempts: with the answer to the last
    question, or with the mistakes in the last reply, if any. Raises StoreError; PlaitError if a message is damaged.
    """
    answer = state.answer_to_send(state.dag.position(task.task_id))
    messages = () if answer is None else await load_answered_messages(store, run_id, state, task.task_id)
    if answer is not None and answer.attempt == task.attempt:  # asked after any earlier correction
        return Continuation(task.session_id, messages, answer, None, interrupted)
    refused, wrong = await _refused(store, run_id, task, 0 if answer is None else answer.attempt)
    answer = answer if wrong is None else None  # sent already
    return Continuation(task.session_id, messages, answer, wrong, interrupted, refused)


async def _refused(store: Store, run_id: str, task: TaskRecord, after: int) -> tuple[tuple[Message, ...], str | None]:
    """Return the messages of the attempts after number `after` whose answers were refused in the task's session, and
    the prompt for the correction of the last one; () and None if no such attempt exists.
    """
    refused: list[AttemptRecord] = []
    for attempt in reversed(await store.list_attempts(run_id, task.task_id)):
        reopened = attempt.status in {AttemptStatus.FAILED, AttemptStatus.COMPLETED}
        if attempt.session_id != task.session_id or attempt.attempt <= after or reopened:
            break
        if attempt.status == AttemptStatus.RETRIED and is_refusal(attempt.error):
            refused.append(attempt)
    if not refused:
        return (), None
    numbers = {attempt.attempt for attempt in refused}
    messages = [one for one in await store.list_messages(run_id, task.task_id) if one.attempt in numbers]
    return tuple(_messages(run_id, messages)), correction_prompt(refused[0].error or "")


def _messages(run_id: str, records: Iterable[MessageRecord]) -> list[Message]:
    return [_message(run_id, record) for record in records if record.role != THOUGHTS]


def _message(run_id: str, record: MessageRecord) -> Message:
    if record.damaged:
        raise PlaitError(
            f"message {record.position} of task {record.task_id!r} in run {run_id} does not fit its checksum, "
            f"so the conversation cannot be continued; run the task again in a new run"
        )
    return Message(cast("Role", record.role), record.content, Usage(record.input_tokens, record.output_tokens))
