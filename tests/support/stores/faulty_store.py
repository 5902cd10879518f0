"""A store that fails in every way in which one can fail, in front of one that does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

import anyio

from plait.errors import StoreError
from plait.persistence import Batch, MemoryStore, Note, NoteRecord, Store
from plait.persistence.store_records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord

T = TypeVar("T")


class Fault(Enum):
    """What goes wrong with one call."""

    BEFORE = "fails before any effect"
    AFTER = "fails after its effect"
    HANG = "never answers, has no effect"
    HANG_AFTER = "takes effect, never answers"
    LATE = "fails, and takes effect later"
    SLOW = "answers late"
    ODD = "raises what no store should raise"
    ODD_AFTER = "takes effect, then raises what no store should raise"


Faults = Callable[[str, int], Fault | None]
"""What goes wrong with the n-th call (from 1) of the method that is named."""


def none(_method: str, _number: int) -> None:
    """Nothing ever goes wrong."""


def by_number(faults: Mapping[int, Fault], method: str = "write") -> Faults:
    """Certain calls of `method` go wrong."""
    return lambda name, number: faults.get(number) if name == method else None


def on_write(fault: Callable[[int], Fault | None]) -> Faults:
    """What goes wrong with the n-th write."""
    return lambda name, number: fault(number) if name == "write" else None


def by_chance(rng: random.Random, share: float, *, reads: float = 0.0) -> Faults:
    """That share of the writes, and of the reads, goes wrong, in any way."""

    def faults(method: str, _number: int) -> Fault | None:
        failing = rng.random() < (share if method == "write" else reads)
        return rng.choice(list(Fault)) if failing else None

    return faults


class FaultyStore:
    """`inner` behind `faults`, which may be replaced. Every call takes `pause()` seconds, a slow or a late one
    `slow_s` more. `writes` counts the calls of `write`.

    `inner` has to answer without waiting, as MemoryStore does: what comes late is applied from a timer of the loop.
    """

    def __init__(
        self, inner: Store, faults: Faults = none, *, pause: Callable[[], float] | None = None, slow_s: float = 5.0
    ) -> None:
        self.inner = inner
        self.faults = faults
        self._pause = pause
        self._slow_s = slow_s
        self._calls: dict[str, int] = {}
        self.under_way = 0
        """The writes that have not ended."""

    @property
    def writes(self) -> int:
        return self._calls.get("write", 0)

    async def write(self, batch: Batch) -> None:
        self.under_way += 1
        try:
            await self._call("write", lambda: self.inner.write(batch))
        finally:
            self.under_way -= 1

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._call("get_run", lambda: self.inner.get_run(run_id))

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._call("list_runs", lambda: self.inner.list_runs(limit))

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._call("list_claimable", lambda: self.inner.list_claimable(limit))

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        return await self._call("list_tasks", lambda: self.inner.list_tasks(run_id, only))

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self._call("list_attempts", lambda: self.inner.list_attempts(run_id, task_id))

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self._call("list_messages", lambda: self.inner.list_messages(run_id, task_id))

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
    ) -> tuple[EventRecord, ...]:
        return await self._call("list_events", lambda: self.inner.list_events(run_id, after, limit, kind))

    async def send(self, run_id: str, note: Note) -> None:
        await self._call("send", lambda: self.inner.send(run_id, note))

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return await self._call("list_notes", lambda: self.inner.list_notes(run_id, after))

    async def _call(self, method: str, effect: Callable[[], Coroutine[Any, Any, T]]) -> T:
        number = self._calls[method] = self._calls.get(method, 0) + 1
        fault = self.faults(method, number)
        if self._pause is not None:
            await anyio.sleep(self._pause())
        match fault:
            case Fault.BEFORE:
                raise StoreError(f"planted: {fault.value}")
            case Fault.ODD:
                raise OSError(28, f"planted: {fault.value}")
            case Fault.HANG:
                await anyio.sleep_forever()
            case Fault.LATE:
                asyncio.get_running_loop().call_later(self._slow_s, self._apply, effect)
                raise StoreError(f"planted: {fault.value}")
            case Fault.SLOW:
                await anyio.sleep(self._slow_s)
            case _:
                pass
        answer = await effect()
        match fault:
            case Fault.AFTER:
                raise StoreError(f"planted: {fault.value}")
            case Fault.ODD_AFTER:
                raise ZeroDivisionError(f"planted: {fault.value}")
            case Fault.HANG_AFTER:
                await anyio.sleep_forever()
            case _:
                return answer
        raise AssertionError

    def _apply(self, effect: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with suppress(StoreError):  # nobody waits for it any more
            at_once(effect())


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """The outcome of a call that does not wait for anything, such as a read of a MemoryStore, from plain code."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    raise AssertionError("the call waits for something; only stores that answer at once can be asked so")


def copy_of(store: MemoryStore) -> MemoryStore:
    """A store with the same runs, which go on apart from now on."""
    copy = MemoryStore()
    store._connection.backup(copy._connection)
    return copy
