"""What the store contract writes: one small run, every state of a task, and what may follow it."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio

from persistence import (
    Batch,
    Change,
    NewTask,
    Owner,
    RunClaimed,
    RunCreated,
    RunStatusChanged,
    Store,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
    TurnAppended,
)

RUN = "run-1"


def at(second: int) -> str:
    return f"2026-11-21T23:00:{second:02d}.000Z"


def owner(owner_id: str = "owner-1") -> Owner:
    return Owner(owner_id, "host", "boot", 4711, "12345", at(1))


TASKS = (NewTask("a", "First."), NewTask("b", "Then {{ a }}", ("a",), "fast", '{"weight": 2}'), NewTask("c", "Last."))
CREATED = RunCreated(at(0), "moon", '{"concurrency": 8}', TASKS)
CLAIMED = RunClaimed(at(1), owner(), 1000.5)
RUNNING = RunStatusChanged(at(2), "running")
START_A = TaskStarted(at(3), "a", 1, "fast", "session-a")
ASK = TurnAppended(at(3), "a", 1, "user", "First.", 3, 0)
ANSWER = TurnAppended(at(4), "a", 1, "assistant", "The Moon.", 0, 2)
DONE_A = TaskCompleted(at(4), "a", 1, "The Moon.", '{"moon": true}', 3, 2, 0.25, 1.5)
OPENING = (CREATED, CLAIMED, RUNNING)


class Writer:
    """Writes changes of one run in order, numbering them as a runner does."""

    def __init__(self, store: Store, run_id: str = RUN) -> None:
        self.store, self.run_id, self.next_seq, self.epoch = store, run_id, 1, 0

    def batch(self, *changes: Change) -> Batch:
        return Batch(self.run_id, self.epoch, self.next_seq, changes)

    async def write(self, *changes: Change) -> Batch:
        batch = self.batch(*changes)
        await self.store.write(batch)
        self.next_seq += len(changes)
        self.epoch += sum(isinstance(change, RunClaimed) for change in changes)
        return batch


async def whole(store: Store, run_id: str = RUN) -> tuple[Any, ...]:
    """Everything that can be read of a run, to be compared."""
    tasks = await store.list_tasks(run_id)
    messages = [await store.list_messages(run_id, task.task_id) for task in tasks]
    run, attempts = await store.get_run(run_id), await store.list_attempts(run_id)
    return run, tasks, attempts, messages, await store.list_events(run_id)


ASKED = TaskWaiting(at(4), "a", 1, "Was it sent?", crashed=True)
AT_START: dict[str, tuple[Change, ...]] = {
    "pending": (),
    "running": (START_A,),
    "retried": (START_A, TaskRetried(at(4), "a", 1, "transient", "reset", 0.5)),
    "interrupted": (START_A, TaskInterrupted(at(4), "a", 1, "crash")),
    "completed": (START_A, DONE_A),
    "failed": (START_A, TaskFailed(at(4), "a", 1, "failed", "auth", "no key", 0.5)),
    "skipped": (START_A, TaskFailed(at(4), "a", 1, "skipped", "auth", "no key", 0.5)),
    "cancelled": (START_A, TaskCancelled(at(4), "a")),
    "cancelled before": (TaskCancelled(at(4), "a"),),
    "reopened": (START_A, TaskFailed(at(4), "a", 1, "failed", "auth", "no key"), TaskReopened(at(5), "a")),
    "reopened as damaged": (START_A, DONE_A, TaskReopened(at(5), "a", damaged=True)),
    "waiting": (START_A, ASKED),
    "answered": (START_A, ASKED, TaskAnswered(at(5), "a")),
    "done by a person": (START_A, ASKED, TaskCompleted(at(5), "a", 1, "Done.")),
    "failed by a person": (START_A, ASKED, TaskFailed(at(5), "a", 1, "failed", "refused", "no")),
    "cancelled while waiting": (START_A, ASKED, TaskCancelled(at(5), "a")),
}
NEXT: dict[str, Change] = {
    "start 1": TaskStarted(at(6), "a", 1, "fast"),
    "start 2": TaskStarted(at(6), "a", 2, "fast"),
    "complete": TaskCompleted(at(6), "a", 1, "again"),
    "complete 2": TaskCompleted(at(6), "a", 2, "again"),
    "fail": TaskFailed(at(6), "a", 1, "failed", "auth", "no"),
    "skip": TaskFailed(at(6), "a", 1, "skipped", "auth", "no"),
    "fail as completed": TaskFailed(at(6), "a", 1, "completed", "auth", "no"),
    "retry": TaskRetried(at(6), "a", 1, "transient", "no", 1.0),
    "interrupt": TaskInterrupted(at(6), "a", 1, "stop"),
    "cancel": TaskCancelled(at(6), "a"),
    "ask": TaskWaiting(at(6), "a", 1, "And now?"),
    "answer": TaskAnswered(at(6), "a"),
    "reopen": TaskReopened(at(6), "a"),
    "reopen as damaged": TaskReopened(at(6), "a", damaged=True),
}
_PENDING_AGAIN = {"start 2": "running", "cancel": "cancelled"}
LEGAL: dict[str, dict[str, str]] = {
    "pending": {"start 1": "running", "cancel": "cancelled"},
    "running": {
        "complete": "completed",
        "fail": "failed",
        "skip": "skipped",
        "retry": "pending",
        "interrupt": "pending",
        "ask": "waiting_input",
        "cancel": "cancelled",
    },
    "waiting": {
        "complete": "completed",
        "fail": "failed",
        "skip": "skipped",
        "answer": "pending",
        "cancel": "cancelled",
    },
    "retried": _PENDING_AGAIN,
    "interrupted": _PENDING_AGAIN,
    "reopened": _PENDING_AGAIN,
    "reopened as damaged": _PENDING_AGAIN,
    "answered": _PENDING_AGAIN,
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
    "waiting_input": {"running", "cancelling", "cancelled"},
    "cancelling": {"cancelled"},
    "completed": {"running"},
    "failed": {"running"},
    "cancelled": set(),
}
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
    async def write() -> None:
        await store.write(batch)

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        await _let_others_run(steps)
        group.cancel_scope.cancel()


async def cancel_natively(store: Store, batch: Batch, steps: int) -> None:
    """As `asyncio.Task.cancel` does it, which passes through every shield of anyio's."""
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
