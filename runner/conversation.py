"""A task's conversation, read back from the store together with everything that it continues."""

from __future__ import annotations

from typing import cast

from backends.protocol import Message, Role, Usage
from persistence.protocol import Store
from persistence.records import MessageRecord
from runner.errors import PlaitError
from runner.state import Past, RunState


async def load_past(store: Store, run_id: str, state: RunState, task_id: str, *, persons: bool = False) -> Past:
    """The messages of `task_id` behind those of the tasks that it continues, oldest first, without a session id.

    A task that did not complete has no conversation to go on with: whoever continued it began afresh. Of a task's
    attempts only the last one counts, with those that ended with a question which it goes on from, and of these what
    was answered: a turn that was cut is no turn. Turns that a
    person added after the run belong to the task they were added to: tasks that continue it do not see them, and with
    `persons` they are read for `task_id` itself. Raises StoreError; PlaitError for a damaged message.
    """
    links = [task_id]
    while (before := state.went_on_with(links[-1])) is not None:
        links.append(before)
    messages: list[Message] = []
    for link in reversed(links):
        with_persons = persons and link == task_id
        stored = await store.list_messages(run_id, link)
        counted = {max((record.attempt for record in stored), default=0), *state.asked_in(link)}
        if with_persons:
            counted.add(0)
        own = [record for record in stored if record.attempt in counted]
        while own and own[-1].role != "assistant":
            own.pop()
        messages += [_message(run_id, record) for record in own]
    return Past(None, tuple(messages))


async def load_said(
    store: Store, run_id: str, state: RunState, task_id: str, open_in: int | None = None
) -> tuple[Message, ...]:
    """What was said in the conversation of `task_id` up to the last question that was answered, or to the one that is
    open since attempt `open_in`; without what it continues. Raises as `load_past`.
    """
    asked = state.asked_in(task_id) | ({open_in} if open_in is not None else set[int]())
    stored = await store.list_messages(run_id, task_id)
    return tuple(_message(run_id, record) for record in stored if record.attempt in asked)


def _message(run_id: str, record: MessageRecord) -> Message:
    if record.damaged:
        raise PlaitError(
            f"message {record.position} of task {record.task_id!r} in run {run_id} does not fit its checksum, "
            f"so its conversation cannot be continued; run the task again in a new run"
        )
    return Message(cast("Role", record.role), record.content, Usage(record.input_tokens, record.output_tokens))
