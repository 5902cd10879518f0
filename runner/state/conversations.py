"""A task's conversation, read back from the store together with everything that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.protocol import Message, Role, Usage
from plait.persistence.protocol import Store
from plait.persistence.records import EventKind, MessageRecord, TaskRecord
from plait.runner.domain.conversation import NOT_ADDED, Continuation, History, mistakes_prompt
from plait.runner.domain.status import TaskStatus
from plait.runner.errors import PlaitError
from plait.runner.state.run_state import RunState


async def load_past(store: Store, run_id: str, state: RunState, task_id: str, *, persons: bool = False) -> History:
    """The messages of `task_id` behind those of the tasks that it continues, oldest first, without a session id.

    A task that did not complete has no conversation to go on with: whoever continued it began afresh. Of a task's
    attempts only the last one counts, with those that ended with a question which it goes on from, and of these what
    was answered: a turn that was cut is no turn. Turns that a person added after the run belong to the task that they
    were added to: tasks that continue it do not see them, and with `persons` they are read for `task_id` itself. What
    `state` has in memory is not read again.

    Raises StoreError; PlaitError for a damaged message; BackendError, transient, where `state` is that of a live run,
    and the store is behind it.
    """
    links, messages = [task_id], list[Message]()
    while (before := await _went_on_with(store, run_id, state, links[-1])) is not None:
        kept = state.conversation(before)
        if kept is not None:
            messages += kept.messages
            break
        links.append(before)
    for link in reversed(links):
        with_persons = persons and link == task_id
        stored = await store.list_messages(run_id, link)
        _refuse_older(state, link, stored)
        counted = {max((record.attempt for record in stored), default=0), *state.asked_in(link)}
        if with_persons:
            counted.add(0)
        own = [record for record in stored if record.attempt in counted]
        while own and own[-1].role != "assistant":
            own.pop()
        messages += [_message(run_id, record) for record in own]
    return History(None, tuple(messages))


async def _went_on_with(store: Store, run_id: str, state: RunState, task_id: str) -> str | None:
    """The task whose conversation `task_id` has gone on with, or will; None where it began one."""
    task = state.dag[task_id]
    before = task.continues
    # Of a task with for_each the parts have conversations, not it itself.
    if before is None or task.for_each is not None or not state.is_completed(before):
        return None
    position, other = state.dag.position(task_id), state.dag.position(before)
    if position >= len(state.records) or state.is_ours(position):
        return before  # what a task waits for ends before it begins, in the same process
    its, earlier = state.records[position], state.records[other]
    # It may have been completed only afterwards, by a person's wish.
    if its.attempt == 0 or its.session_id == state.results[other].session_id:
        return before
    if state.is_ours(other):
        return None
    if (earlier.ended_at or "") <= (its.started_at or ""):
        return before
    # Clocks may jump, the history does not.
    return before if await _began_after(store, run_id, its, before) else None


async def _began_after(store: Store, run_id: str, its: TaskRecord, other: str) -> bool:
    """Whether the last attempt of a task began after `other` was completed for the last time."""
    began = ended = after = 0
    while page := await store.list_events(run_id, after):
        for event in page:
            if event.kind == EventKind.TASK_STARTED and (event.task_id, event.attempt) == (its.task_id, its.attempt):
                began = event.seq
            elif event.kind == EventKind.TASK_COMPLETED and event.task_id == other:
                ended = event.seq
        after = page[-1].seq
    return began > ended


def _refuse_older(state: RunState, task_id: str, stored: Sequence[MessageRecord]) -> None:
    """Raise unless the attempt with which this process completed the task is among what is stored of it."""
    position = state.dag.position(task_id)
    if not state.is_ours(position) or state.dag.tasks[position].for_each is not None:
        return  # nobody talks in a task that only gathers
    if all(record.attempt != state.attempts[position] for record in stored):
        message = f"the conversation of task {task_id!r} is not in the store yet, which is away or behind"
        raise BackendError(ErrorKind.TRANSIENT, message)


async def load_said(
    store: Store, run_id: str, state: RunState, task_id: str, open_in: int | None = None
) -> tuple[Message, ...]:
    """What was said in the conversation of `task_id` up to the last question that was answered, or to the one that is
    open since attempt `open_in`; without what it continues. Raises as `load_past`.
    """
    asked = state.asked_in(task_id) | ({open_in} if open_in is not None else set[int]())
    stored = await store.list_messages(run_id, task_id)
    return tuple(_message(run_id, record) for record in stored if record.attempt in asked)


async def load_going_on(
    store: Store, run_id: str, state: RunState, task: TaskRecord, *, interrupted: bool
) -> Continuation:
    """How an attempt of `task` takes up the conversation that its earlier attempts began: with the answer to its last
    question, or with what was wrong with its last reply, if either is there. Raises as `load_past`.
    """
    answer = state.answer_to_say(state.dag.position(task.task_id))
    said = () if answer is None else await load_said(store, run_id, state, task.task_id)
    if answer is not None and answer.attempt == task.attempt:  # it was asked after whatever had been corrected before
        return Continuation(task.session_id, said, answer, None, interrupted)
    refused, wrong = await _refused(store, run_id, task, 0 if answer is None else answer.attempt)
    answer = answer if wrong is None else None  # it has been taken
    return Continuation(task.session_id, said, answer, wrong, interrupted, refused)


async def _refused(store: Store, run_id: str, task: TaskRecord, asked: int) -> tuple[tuple[Message, ...], str | None]:
    """What the task's session holds of an attempt after number `asked` whose reply brought tasks that were wrong, and
    what was, or is to be, said about that in it.
    """
    for attempt in reversed(await store.list_attempts(run_id, task.task_id)):
        reopened = attempt.status in {TaskStatus.FAILED.value, TaskStatus.COMPLETED.value}
        if attempt.session_id != task.session_id or attempt.attempt <= asked or reopened:
            break
        error = attempt.error or ""
        if attempt.status == "retried" and error.startswith(NOT_ADDED):
            said = [one for one in await store.list_messages(run_id, task.task_id) if one.attempt == attempt.attempt]
            return tuple(_message(run_id, record) for record in said), mistakes_prompt(error)
    return (), None


def _message(run_id: str, record: MessageRecord) -> Message:
    if record.damaged:
        raise PlaitError(
            f"message {record.position} of task {record.task_id!r} in run {run_id} does not fit its checksum, "
            f"so its conversation cannot be continued; run the task again in a new run"
        )
    return Message(cast("Role", record.role), record.content, Usage(record.input_tokens, record.output_tokens))
