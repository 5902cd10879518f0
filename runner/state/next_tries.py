"""The times of the next attempts of tasks that wait for a retry, from the stored events."""

from __future__ import annotations

import json
import math
from collections.abc import Collection

from plait.persistence.protocol import Store
from plait.persistence.records import EventKind, TaskRecord
from plait.runner.domain.question import parse_time
from plait.runner.domain.status import TASK_STATUSES, TaskStatus


async def next_tries(
    store: Store, run_id: str, tasks: Collection[TaskRecord], now: float = math.inf
) -> dict[str, float]:
    """Return the Unix time of the next attempt, by task id, for each task that waits for a retry.

    The time may be in the past. If the clock was set back, the delay counts from `now` and is thus never longer than
    recorded. Raises StoreError.
    """
    failed = {task.task_id: task.attempt for task in tasks if _waits_to_be_tried_again(task)}
    times: dict[str, float] = {}
    after = 0
    while failed and (page := await store.list_events(run_id, after, kind=EventKind.TASK_RETRIED)):
        for event in page:
            if event.task_id and failed.get(event.task_id) == event.attempt:
                times[event.task_id] = min(parse_time(event.at), now) + json.loads(event.detail)["delay_s"]
        after = page[-1].seq
    return times


def _waits_to_be_tried_again(task: TaskRecord) -> bool:
    return TASK_STATUSES[task.status] is TaskStatus.PENDING and task.error_kind is not None
