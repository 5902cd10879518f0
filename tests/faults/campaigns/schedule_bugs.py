"""Bugs that the schedules have to show, each planted by changing one thing while it is looked for."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import anyio

from plait import events
from plait.errors import Conflict, Fenced, StoreError
from plait.events import Event
from plait.persistence.store_records import Batch, TaskRecord
from plait.runner.engine import checkpointer as checkpoint
from plait.runner.engine import executor as execution
from plait.runner.engine import lease
from plait.runner.engine.checkpointer import COMMITTED, Commit, WritePosition
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import RunOptions
from plait.runner.recovery import resume
from plait.runner.scheduling import scheduler as schedule
from plait.runner.scheduling import slots as places
from plait.runner.state import run_state as state
from plait.runner.state import stored_run as stored
from plait.statuses import TaskStatus


def _dependents_before_commit() -> AbstractContextManager[object]:
    submit = checkpoint.Checkpointer.submit

    def stored_at_once(self: Any, happened: Sequence[events.Event]) -> Commit:
        submit(self, happened)
        return COMMITTED

    return mock.patch.object(checkpoint.Checkpointer, "submit", stored_at_once)


@contextmanager
def _written_within_the_callers_scope() -> Generator[None]:
    """Whoever commits writes as well, one at a time, so that what cancels it cancels the writing."""
    write_group = checkpoint.Checkpointer._write_group
    locks: dict[int, anyio.Lock] = defaultdict(anyio.Lock)

    async def write_alone(self: Any) -> None:
        async with locks[id(self)]:
            await write_group(self)

    submit = checkpoint.Checkpointer.submit

    class Written(Commit):
        def __init__(self, checkpointer: Any, settled: Commit) -> None:
            super().__init__()
            self.checkpointer, self.settled = checkpointer, settled

        async def wait(self) -> None:
            await self.checkpointer._write_group()
            await self.settled.wait()

        def then(self, call: Callable[[], None]) -> None:
            self.settled.then(call)

    def submit_to_be_written(self: Any, happened: Sequence[events.Event]) -> Commit:
        return Written(self, submit(self, happened))

    with (
        mock.patch.object(checkpoint.Checkpointer, "_write_group", write_alone),
        mock.patch.object(checkpoint.Checkpointer, "submit", submit_to_be_written),
    ):
        yield


def _told_before_commit() -> AbstractContextManager[object]:
    submit = checkpoint.Checkpointer.submit

    def telling(self: Any, happened: Sequence[events.Event]) -> Commit:
        for event in happened:
            self._publish_event(event)
        return submit(self, happened)

    return mock.patch.object(checkpoint.Checkpointer, "submit", telling)


def _limit_off_by_one() -> AbstractContextManager[object]:
    take = schedule.Scheduler.take

    def generous(self: Any) -> int | None:
        self._slots.concurrency += 1
        try:
            return take(self)
        finally:
            self._slots.concurrency -= 1

    return mock.patch.object(schedule.Scheduler, "take", generous)


def _backend_limit_off_by_one() -> AbstractContextManager[object]:
    may_take = property(lambda queue: queue.account.is_open and queue.slots.taken <= queue.slots.ceiling)
    return mock.patch.object(places.ReadyQueue, "may_take", may_take)


def _wake_up_lost() -> AbstractContextManager[object]:
    """An idle worker looks, and only a moment later lies down: whoever wakes the idle in between does not see it."""
    next_turn = execution.Executor._next_turn

    async def slow(self: Any) -> object:
        if not self._scheduler.exhausted:
            await self._run.options.clock.sleep(0.005)
            return await self._wait_idle()
        return await next_turn(self)

    return mock.patch.object(execution.Executor, "_next_turn", slow)


def _retry_not_requeued() -> AbstractContextManager[object]:
    async def forgetful(self: Any, _position: int) -> None:
        happened: list[events.Event] = []
        await self._start(self._take(happened), happened)

    return mock.patch.object(execution.Executor, "_try_again", forgetful)


def _unknown_taken_for_not_stored() -> AbstractContextManager[object]:
    """After an error the same changes are written anew, behind whatever the store has by then."""

    async def anew(self: Any, head: tuple[Event, ...]) -> StoreError | None:
        try:
            await self._store.write(Batch(self._run_id, self._position.epoch, self._position.next_seq, head))
        except (Conflict, Fenced) as error:
            return error
        except StoreError as error:
            record = await self._store.get_run(self._run_id)
            if record is not None:
                self._position = WritePosition(record.epoch, record.last_seq + 1)
            return error
        return None

    return mock.patch.object(checkpoint.Checkpointer, "_try_write", anew)


def _lease_by_wall_clock_alone() -> AbstractContextManager[object]:
    wait_until_free = lease.wait_for_expiry

    async def trusting(config: RunOptions, run: stored.StoredRun, live: LiveRun) -> bool:
        expired = (run.record.lease_expires_at or 0.0) <= config.clock.wall()
        return expired or await wait_until_free(config, run, live)

    return mock.patch.object(resume, "wait_for_expiry", trusting)


def _done_tasks_again() -> AbstractContextManager[object]:
    load = state.RunState._load

    def forgetting(self: Any, position: int, record: TaskRecord) -> None:
        load(self, position, record)
        if self.statuses[position] is TaskStatus.COMPLETED:
            self.statuses[position] = TaskStatus.PENDING
            del self.results[position]

    return mock.patch.object(state.RunState, "_load", forgetting)


def _stop_taken_for_crash() -> AbstractContextManager[object]:
    """What was under way at a stop is left as it is, instead of being settled."""
    leave = execution.Executor.finish

    def careless(self: Any) -> list[events.Event]:
        left = leave(self)
        return [event for event in left if not isinstance(event, events.TaskInterrupted)]

    return mock.patch.object(execution.Executor, "finish", careless)


def _at_most_once_tried_again() -> AbstractContextManager[object]:
    wait = state.RunState.wait_for_decision

    def unasking(self: Any, position: int, *about: Any, **more: Any) -> events.TaskWaiting:
        waiting = wait(self, position, *about, **more)
        self.statuses[position] = TaskStatus.PENDING
        del self.questions[position]
        return waiting

    return mock.patch.object(state.RunState, "wait_for_decision", unasking)


BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "dependents woken before the commit": _dependents_before_commit,
    "written within the caller's scope": _written_within_the_callers_scope,
    "told before the commit": _told_before_commit,
    "concurrency off by one": _limit_off_by_one,
    "a backend's limit off by one": _backend_limit_off_by_one,
    "wake-up of an idle worker lost": _wake_up_lost,
    "requeue forgotten after a retry's delay": _retry_not_requeued,
    "commit error taken for not stored": _unknown_taken_for_not_stored,
    "lease judged by the wall clock alone": _lease_by_wall_clock_alone,
    "resume runs done tasks again": _done_tasks_again,
    "what a stop cut left as running": _stop_taken_for_crash,
    "at_most_once begun again unasked": _at_most_once_tried_again,
}
