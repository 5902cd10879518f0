"""Whether and when a failed attempt is tried again: the policy is in `Retry`, chance comes in.

A server's hint holds for later processes as well: a limit that is lifted in three hours is not asked about after a
minute because the run was resumed meanwhile.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Awaitable, Callable, Collection

import anyio
import anyio.abc

from plait.backends.errors import BackendError
from plait.persistence.protocol import Store
from plait.persistence.records import EventKind, TaskRecord
from plait.runner.clock import Clock
from plait.runner.domain.question import parse_time
from plait.runner.domain.status import TASK_STATUSES, TaskStatus
from plait.runner.domain.task import NEVER_RETRIED, Retry

LONGEST_HINT_S = 86_400.0
"""A server that asks for more than a day is not waited for: the task fails, and a person decides."""


def deserves_retry(retry: Retry, failures: int, error: BackendError) -> bool:
    """Whether another attempt follows, after `failures` that count; one that was throttled may have none."""
    waits = error.retry_after is None or error.retry_after <= LONGEST_HINT_S
    deserves = error.kind in retry.on and error.kind not in NEVER_RETRIED
    return deserves and max(failures, 1) < retry.attempts and waits


def retry_delay(retry: Retry, times: int, hint: float | None, rng: random.Random) -> float:
    """Seconds to wait after the `times`-th failure: see `Retry`."""
    if hint is not None and hint >= retry.base_delay:
        return hint + rng.uniform(0, retry.base_delay)
    # Also after a hint that is hardly one: the time that was named has passed, and the limit has not.
    return (hint or 0.0) + rng.uniform(0, min(retry.max_delay, retry.base_delay * 2 ** min(times - 1, 60)))


class Delays:
    """What tasks wait in between two attempts. `try_again` is called when the time of one has come, or nobody wants it
    any more.
    """

    def __init__(self, clock: Clock, try_again: Callable[[int], Awaitable[None]]) -> None:
        self._clock = clock
        self._try_again = try_again
        self._scopes: dict[int, anyio.CancelScope] = {}

    def begin(self, workers: anyio.abc.TaskGroup, position: int, delay: float) -> None:
        """The task at `position` waits for `delay` seconds; not at all where its time has passed."""
        self._scopes[position] = scope = anyio.CancelScope()
        workers.start_soon(self._wait, position, delay, scope)

    def end(self, position: int) -> None:
        """Nobody waits for the task's next attempt any more, if anybody did."""
        if position in self._scopes:
            self._scopes[position].cancel()

    async def _wait(self, position: int, delay: float, scope: anyio.CancelScope) -> None:
        with scope:
            await self._clock.sleep(max(0.0, delay))
        del self._scopes[position]
        await self._try_again(position)


async def next_tries(
    store: Store, run_id: str, tasks: Collection[TaskRecord], now: float = math.inf
) -> dict[str, float]:
    """When (Unix time) those of the run's tasks are tried again whose last attempt failed and deserved that, by id; the
    time may have passed. From `now` on nobody waits for longer than was said, should the clock have been put back.
    Raises StoreError.
    """
    failed = {task.task_id: task.attempt for task in tasks if _waits_to_be_tried_again(task)}
    times: dict[str, float] = {}
    after = 0
    while failed and (page := await store.list_events(run_id, after)):
        for event in page:
            if event.kind == EventKind.TASK_RETRIED and event.task_id and failed.get(event.task_id) == event.attempt:
                times[event.task_id] = min(parse_time(event.at), now) + json.loads(event.detail)["delay_s"]
        after = page[-1].seq
    return times


def _waits_to_be_tried_again(task: TaskRecord) -> bool:
    return TASK_STATUSES[task.status] is TaskStatus.PENDING and task.error_kind is not None
