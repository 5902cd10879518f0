"""A task's conversation, read back from the store together with everything that it continues."""

from __future__ import annotations

from typing import cast

from backends.protocol import Message, Role, Usage
from persistence.protocol import Store
from persistence.records import MessageRecord
from runner.dag import DAG
from runner.errors import PlaitError
from runner.state import Past


async def load_past(store: Store, run_id: str, dag: DAG, task_id: str, *, persons: bool = False) -> Past:
    """The messages of `task_id` behind those of the tasks that it continues, oldest first, without a session id.

    Turns that a person added after the run belong to the task they were added to: tasks that continue it do not see
    them, and with `persons` they are read for `task_id` itself. Raises StoreError; PlaitError for a damaged message.
    """
    links = [task_id]
    while (before := dag[links[-1]].continues) is not None:
        links.append(before)
    messages: list[Message] = []
    for link in reversed(links):
        with_persons = persons and link == task_id
        stored = await store.list_messages(run_id, link)
        messages += [_message(run_id, record) for record in stored if with_persons or record.attempt > 0]
    return Past(None, tuple(messages))


def _message(run_id: str, record: MessageRecord) -> Message:
    if record.damaged:
        raise PlaitError(
            f"message {record.position} of task {record.task_id!r} in run {run_id} does not fit its checksum, "
            f"so its conversation cannot be continued; run the task again in a new run"
        )
    return Message(cast("Role", record.role), record.content, Usage(record.input_tokens, record.output_tokens))
