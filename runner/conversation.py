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
    attempts only the last one counts, and of that what was answered: a turn that was cut is no turn. Turns that a
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
        last = max((record.attempt for record in stored), default=0)
        own = [record for record in stored if record.attempt == last or (with_persons and not record.attempt)]
        while own and own[-1].role != "assistant":
            own.pop()
        messages += [_message(run_id, record) for record in own]
    return Past(None, tuple(messages))


def _message(run_id: str, record: MessageRecord) -> Message:
    if record.damaged:
        raise PlaitError(
            f"message {record.position} of task {record.task_id!r} in run {run_id} does not fit its checksum, "
            f"so its conversation cannot be continued; run the task again in a new run"
        )
    return Message(cast("Role", record.role), record.content, Usage(record.input_tokens, record.output_tokens))
