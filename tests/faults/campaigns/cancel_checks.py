"""What a cancelled call must leave: nothing open, nothing half-written, and a run that comes to its end."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Hashable
from contextlib import closing
from pathlib import Path

from plait import ParallelRunner, RunStatus, TaskStatus
from plait.persistence import SQLiteStore
from plait.persistence.store_records import AttemptRecord, MessageRecord, RunRecord, TaskRecord
from plait.statuses import TASK_DONE
from tests.faults.campaigns.cancel_calls import DIAMOND, RUN, TEXTS, Server
from tests.support.cancelling import Cancelled
from tests.support.fakes import ShortDelays


def outcome_of(cancelled: Cancelled) -> list[str]:
    """What is wrong with how the call ended."""
    error = cancelled.error
    if isinstance(error, asyncio.CancelledError):
        return []
    if error is not None:
        return [f"it raised {type(error).__name__}: {error}"]
    if cancelled.landed and cancelled.how.startswith("native"):
        return ["the cancellation was swallowed"]
    return []


def tasks_left() -> list[str]:
    return [f"{task.get_name()} is left" for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def threads_left(before: set[threading.Thread]) -> list[str]:
    """Threads that go on; anyio keeps its own for the next call."""
    new = [thread for thread in threading.enumerate() if thread not in before and "AnyIO" not in thread.name]
    for thread in new:
        thread.join(2.0)
    return [f"{thread.name} is left" for thread in new if thread.is_alive()]


def open_transaction(path: Path) -> list[str]:
    """Whether somebody else could not write at once."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            return [f"a transaction is open: {error}"]
        other.execute("ROLLBACK")
    return []


def files_left(path: Path) -> list[str]:
    """Whether a new database that never got its name is left."""
    return [f"{left.name} is left" for left in path.parent.glob(f".{path.name}.*")]


async def half_written(store: SQLiteStore) -> list[str]:
    """What is stored of the tasks that does not fit together."""
    attempts = await store.list_attempts(RUN)
    wrong: list[str] = []
    for task in await store.list_tasks(RUN):
        wrong += _wrong_attempts(task, [attempt for attempt in attempts if attempt.task_id == task.task_id])
        wrong += _wrong_messages(task, await store.list_messages(RUN, task.task_id))
    return wrong


def _wrong_attempts(task: TaskRecord, attempts: list[AttemptRecord]) -> list[str]:
    wrong: list[str] = []
    if [attempt.attempt for attempt in attempts] != list(range(1, task.attempt + 1)):
        wrong.append(f"{task.task_id} is at attempt {task.attempt}, stored are {attempts}")
    running = [attempt.attempt for attempt in attempts if attempt.status == TaskStatus.RUNNING.value]
    if running != ([task.attempt] if TaskStatus(task.status) is TaskStatus.RUNNING else []):
        wrong.append(f"{task.task_id} is {task.status}, its attempts {running} are running")
    return wrong


def _wrong_messages(task: TaskRecord, messages: tuple[MessageRecord, ...]) -> list[str]:
    wrong: list[str] = []
    answers = [message.content for message in messages if message.attempt and message.role == "assistant"]
    if answers != ([task.text] if TaskStatus(task.status) is TaskStatus.COMPLETED else []):
        wrong.append(f"{task.task_id} is {task.status} with {task.text}, its messages are {messages}")
    if [message.role for message in messages if not message.attempt] not in ([], ["user", "assistant"]):
        wrong.append(f"half of a person's turn is stored: {messages}")
    return wrong


def unsettled(record: RunRecord, tasks: tuple[TaskRecord, ...], found: RunRecord | None) -> list[str]:
    """Whether a run that was left by a cancelled call looks like one whose process died. `found` is the run as the call
    found it: an owner that was there before is none of its doing.
    """
    if record.owner is not None and (found is None or record.owner != found.owner):
        return [f"the run has an owner, {record.owner.owner_id}"]
    if record.owner is not None:
        return []
    running = [task.task_id for task in tasks if TaskStatus(task.status) is TaskStatus.RUNNING]
    return [f"{', '.join(running)} are stored as running, by nobody"] if running else []


async def standing(store: SQLiteStore, server: Server) -> Hashable:
    """Where the run stands, times and owners left out: runs that stand alike go on alike."""
    record = await store.get_run(RUN)
    tasks = [
        (task.status, task.attempt, task.text, task.session_id, task.session_confirmed, task.crashes, task.error_kind)
        for task in await store.list_tasks(RUN)
    ]
    whole = None if record is None else (record.status, record.owner is None)
    return whole, tuple(tasks), frozenset(server.sessions), frozenset(server.executed.items())


async def come_to_its_end(store: SQLiteStore, server: Server) -> list[str]:
    """Go on with the run, or run it where there is none."""
    runner = ParallelRunner(server, store=store, rng=ShortDelays())
    record = await store.get_run(RUN)
    if record is None:
        result = await runner.run(DIAMOND, RUN)
        return [] if result.text == TEXTS else [f"run again, it came to {result}"]
    tasks = await store.list_tasks(RUN)
    if RunStatus(record.status) is RunStatus.CANCELLED:
        return [f"{task.task_id} is {task.status} still" for task in tasks if TaskStatus(task.status) not in TASK_DONE]
    done = {task.task_id for task in tasks if TaskStatus(task.status) is TaskStatus.COMPLETED}
    before = server.executed.copy()
    for task_id, verdict in (await runner.runs.preview(RUN)).tasks.items():
        if verdict.action == "ask":
            await runner.runs.settle(RUN, task_id, "again")
    result = await runner.resume(RUN)
    wrong: list[str] = []
    if result.status is not RunStatus.COMPLETED or result.text != TEXTS:
        wrong.append(f"resumed, it came to {result}")
    if again := done & (server.executed - before).keys():
        wrong.append(f"{sorted(again)} were completed, and executed again")
    return wrong
