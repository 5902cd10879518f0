"""The stored state of a run as plain JSON for the ledger."""

from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256
from typing import Any

from plait.events import TaskCompleted, TasksAdded
from plait.persistence import Store
from plait.persistence.store_records import TaskRecord
from plait.runner.domain.continuation import EVIDENCE
from tests.faults.crashtest.cases import digest


async def snapshot(store: Store, run_id: str, *, whole: bool = False) -> dict[str, Any]:
    """Return the status and the tasks of the run; with `whole`, also the messages and, by task, the numbers of stored
    completions and of stored additions of tasks.
    """
    run = await store.get_run(run_id)
    assert run is not None
    attempts: dict[str, list[list[Any]]] = {}
    for one in await store.list_attempts(run_id):
        attempts.setdefault(one.task_id, []).append([one.attempt, one.status])
    held: dict[str, Any] = {"status": run.status, "owned": run.owner is not None}
    tasks = await store.list_tasks(run_id)
    held["tasks"] = {task.task_id: _task(task, attempts.get(task.task_id, [])) for task in tasks}
    if whole:
        for task in tasks:
            said = await store.list_messages(run_id, task.task_id)
            held["tasks"][task.task_id]["said"] = [mark(message.content) for message in said]
        history = await store.list_events(run_id, limit=1_000_000)
        held["completions"] = Counter(event.task_id for event in history if event.kind == TaskCompleted.kind)
        held["growths"] = Counter(event.task_id for event in history if event.kind == TasksAdded.kind and event.task_id)
    return held


def _task(task: TaskRecord, attempts: list[list[Any]]) -> dict[str, Any]:
    data = None if task.data is None else json.loads(task.data)
    result = "" if task.text is None else digest(task.text, data)
    return {"status": task.status, "result": result, "attempts": attempts, "damaged": task.damaged}


def mark(text: str) -> str:
    """Return a short hash of a message; the same for all evidence of checks."""
    return sha256((EVIDENCE if text.startswith(EVIDENCE) else text).encode()).hexdigest()[:16]
