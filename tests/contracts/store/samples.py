"""The data of the store contract: a small run, every state of a task, and the changes allowed after each state."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from plait.dialogue import Message
from plait.events import (
    Event,
    MessageAppended,
    NewTask,
    Owner,
    RunCancelled,
    RunCancelling,
    RunClaimed,
    RunCompleted,
    RunCreated,
    RunFailed,
    RunResumed,
    RunStarted,
    RunWaitingInput,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskSkipped,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import Batch, Store
from plait.statuses import RunStatus
from plait.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Generator

RUN = "run-1"


def at(second: int) -> str:
    """Return a time in the format of a store, `second` seconds after the first."""
    return f"2026-11-21T23:00:{second:02d}.000Z"


def owner(owner_id: str = "owner-1") -> Owner:
    return Owner(owner_id, "host", "boot", 4711, "12345", at(1))


TASKS = (NewTask("a", "First."), NewTask("b", "Then {{ a }}", ("a",), "fast", '{"weight": 2}'), NewTask("c", "Last."))
CREATED = RunCreated(at(0), RUN, "moon", '{"concurrency": 8}', TASKS)
CLAIMED = RunClaimed(at(1), owner(), 1000.5)


def run_becomes(at: str, status: str, error: str | None = None, resumed: bool = False) -> Event:
    """Return the event that gives the run the status."""
    match status:
        case "running":
            return RunResumed(at, RUN, RunStatus.FAILED, 0) if resumed else RunStarted(at, RUN)
        case "cancelling":
            return RunCancelling(at, RUN)
        case _:
            ends = (RunWaitingInput, RunCompleted, RunFailed, RunCancelled)
            return next(end for end in ends if end.status == status)(at, RUN, error)


def message(
    at: str, task_id: str, attempt: int, role: Any, content: str, input_tokens: int = 0, output_tokens: int = 0
) -> MessageAppended:
    """Return the event that appends a message."""
    return MessageAppended(at, task_id, attempt, Message(role, content, Usage(input_tokens, output_tokens)))


def reworded(event: MessageAppended, content: str) -> MessageAppended:
    """Return the event with another text."""
    return replace(event, message=replace(event.message, content=content))


RUNNING = run_becomes(at(2), "running")
START_A = TaskStarted(at(3), "a", 1, "fast", "session-a")
ASK = message(at(3), "a", 1, "user", "First.", 3, 0)
ANSWER = message(at(4), "a", 1, "assistant", "The Moon.", 0, 2)
DONE_A = TaskCompleted(at(4), "a", 1, "The Moon.", '{"moon": true}', Usage(3, 2, 0.25, "sample-1"), 1.5)
OPENING = (CREATED, CLAIMED, RUNNING)


class Writer:
    """Writes the changes of one run in order, numbered as by a runner."""

    def __init__(self, store: Store, run_id: str = RUN) -> None:
        self.store, self.run_id, self.next_seq, self.epoch = store, run_id, 1, 0

    def batch(self, *changes: Event) -> Batch:
        return Batch(self.run_id, self.epoch, self.next_seq, changes)

    async def write(self, *changes: Event) -> Batch:
        batch = self.batch(*changes)
        await self.store.write(batch)
        self.next_seq += len(changes)
        self.epoch += sum(isinstance(change, RunClaimed) for change in changes)
        return batch


@contextmanager
def case(name: str) -> Generator[None]:
    """Name the case in the report if a test of several cases fails in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the case: {name}")
        raise


async def whole(store: Store, run_id: str = RUN) -> tuple[Any, ...]:
    """Return every record of a run, for comparison: the run, tasks, attempts, messages by task, and events."""
    run, tasks, attempts, events = await without_messages(store, run_id)
    return run, tasks, attempts, [await store.list_messages(run_id, task.task_id) for task in tasks], events


async def without_messages(store: Store, run_id: str = RUN) -> tuple[Any, ...]:
    """Return every record of a run but the messages, which a run of thousands of tasks takes long to read."""
    run, tasks = await store.get_run(run_id), await store.list_tasks(run_id)
    return run, tasks, await store.list_attempts(run_id), await store.list_events(run_id)


ASKED = TaskWaiting(at(4), "a", 1, "Was it sent?", crashed=True)
ASKING = TaskWaiting(
    at(4),
    "a",
    1,
    "Which one?",
    asked='{"kind": "choice"}',
    duration_s=1.5,
    usage=Usage(3, 2, 0.25, "sample-1"),
)
AT_START: dict[str, tuple[Event, ...]] = {
    "pending": (),
    "running": (START_A,),
    "retried": (START_A, TaskRetried(at(4), "a", 1, "transient", "reset", 0.5)),
    "interrupted": (START_A, TaskInterrupted(at(4), "a", 1, "crash")),
    "completed": (START_A, DONE_A),
    "failed": (START_A, TaskFailed(at(4), "a", 1, "auth", "no key", 0.5)),
    "skipped": (START_A, TaskSkipped(at(4), "a", 1, "auth", "no key", 0.5)),
    "cancelled": (START_A, TaskCancelled(at(4), "a", 1)),
    "cancelled before": (TaskCancelled(at(4), "a", 1),),
    "reopened": (START_A, TaskFailed(at(4), "a", 1, "auth", "no key"), TaskReopened(at(5), "a", 1)),
    "reopened with another prompt": (
        START_A,
        TaskFailed(at(4), "a", 1, "auth", "no key"),
        TaskReopened(at(5), "a", 1, prompt="Say it better."),
    ),
    "reopened as damaged": (START_A, DONE_A, TaskReopened(at(5), "a", 1, damaged=True)),
    "waiting": (START_A, ASKED),
    "asking": (START_A, ASKING),
    "answered": (START_A, ASKED, TaskAnswered(at(5), "a", 1)),
    "answered itself": (START_A, ASKING, TaskAnswered(at(5), "a", 1, '["this"]')),
    "done by a person": (START_A, ASKED, TaskCompleted(at(5), "a", 1, "Done.")),
    "failed by a person": (START_A, ASKED, TaskFailed(at(5), "a", 1, "refused", "no")),
    "cancelled while waiting": (START_A, ASKED, TaskCancelled(at(5), "a", 1)),
}


def status_changes(task_id: str, attempt: int, text: str = "again", *, flag: bool = False) -> dict[str, Event]:
    """Return every change of a task's status, by name, for a task with the last attempt `attempt`.

    With `flag` the changes have values for all optional fields.
    """
    short, cost = text[:20], 0.25 if flag else None
    return {
        "start": TaskStarted(at(6), task_id, attempt + 1, "fast", short if flag else None, confirmed=flag),
        "complete": TaskCompleted(at(6), task_id, attempt, text, text if flag else None, Usage(3, 4, 0.5), 1.5),
        "complete its prompt": TaskCompleted(
            at(6), task_id, attempt, text, None, Usage(3, 4), turn=text if flag else ""
        ),
        "fail": TaskFailed(at(6), task_id, attempt, "auth", short, 0.5, Usage(1, 1, cost)),
        "skip": TaskSkipped(at(6), task_id, attempt, "auth", short, 0.5, Usage(1, 1)),
        "retry": TaskRetried(at(6), task_id, attempt, "transient", short, 0.5, continues_session=flag),
        "interrupt": TaskInterrupted(at(6), task_id, attempt, "gone", crashed=flag),
        "cancel": TaskCancelled(at(6), task_id, 1),
        "wait": TaskWaiting(at(6), task_id, attempt, short, crashed=flag),
        "ask": TaskWaiting(at(6), task_id, attempt, short, False, text, 0.5, Usage(1, 1, cost)),
        "answer": TaskAnswered(at(6), task_id, 1, text if flag else None),
        "reopen": TaskReopened(at(6), task_id, 1),
        "reopen as damaged": TaskReopened(at(6), task_id, 1, damaged=True),
    }


_OF_FIRST = status_changes("a", 1)
NEXT: dict[str, Event] = {
    **_OF_FIRST,
    "start": status_changes("a", 0)["start"],
    "start 2": _OF_FIRST["start"],
    "complete 2": status_changes("a", 2)["complete"],
}
_PENDING_AGAIN = {"start 2": "running", "cancel": "cancelled"}
_WAITING = {"complete": "completed", "fail": "failed", "skip": "skipped", "answer": "pending", "cancel": "cancelled"}
LEGAL: dict[str, dict[str, str]] = {
    "pending": {"start": "running", "cancel": "cancelled"},
    "running": {
        "complete": "completed",
        "complete its prompt": "completed",
        "fail": "failed",
        "skip": "skipped",
        "retry": "pending",
        "interrupt": "pending",
        "wait": "waiting_input",
        "ask": "waiting_input",
        "cancel": "cancelled",
    },
    "waiting": _WAITING,
    "asking": _WAITING,
    "retried": _PENDING_AGAIN,
    "interrupted": _PENDING_AGAIN,
    "reopened": _PENDING_AGAIN,
    "reopened as damaged": _PENDING_AGAIN,
    "reopened with another prompt": _PENDING_AGAIN,
    "answered": _PENDING_AGAIN,
    "answered itself": _PENDING_AGAIN,
    "completed": {"reopen as damaged": "pending"},
    "done by a person": {"reopen as damaged": "pending"},
    "failed": {"reopen": "pending"},
    "failed by a person": {"reopen": "pending"},
    "skipped": {},
    "cancelled": {},
    "cancelled before": {},
    "cancelled while waiting": {},
}
RUN_LEGAL: dict[str, set[str]] = {
    "queued": {"running", "cancelled"},
    "running": {"waiting_input", "completed", "failed", "cancelling", "cancelled"},
    "waiting_input": {"cancelling", "cancelled"},
    "cancelling": {"cancelled"},
    "completed": set(),
    "failed": set(),
    "cancelled": set(),
}
"""The statuses that may follow each status of a run, but for running once more: RUN_RESUMED."""
RUN_RESUMED = {"running", "waiting_input", "completed", "failed"}
"""The statuses of a run that may be resumed."""
RUN_WAY: dict[str, tuple[str, ...]] = {
    "queued": (),
    "running": ("running",),
    "waiting_input": ("running", "waiting_input"),
    "cancelling": ("running", "cancelling"),
    "completed": ("running", "completed"),
    "failed": ("running", "failed"),
    "cancelled": ("cancelled",),
}


async def cancel_scope(store: Store, batch: Batch, steps: int) -> None:
    """Write the batch, and cancel the write by a cancel scope after `steps` steps of the event loop."""

    async def write() -> None:
        await store.write(batch)

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await _let_others_run(steps)
        group.cancel_scope.cancel()


async def cancel_natively(store: Store, batch: Batch, steps: int) -> None:
    """Write the batch, and cancel the write by `asyncio.Task.cancel`, which passes through the shields of anyio."""
    tasks: list[asyncio.Task[Any]] = []

    async def write() -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await store.write(batch)
        except asyncio.CancelledError:
            task.uncancel()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await _let_others_run(steps + 1)
        tasks[0].cancel()


async def _let_others_run(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)
