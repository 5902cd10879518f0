"""Moments that a test holds: when an owner looks into its inbox, when a grace time ends, when a write is answered."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from plait.clock_and_ids import Clock
from plait.events import Event
from plait.persistence import Batch, NoteRecord, Store
from plait.runner.engine.inbox import LOOK_EVERY_S
from tests.support.stores.faulty_store import FaultyStore

GRACE = 77.0


class HeldClock(Clock):
    """Real time, but looks into the inbox come only when `look` says so, and `GRACE` is over only when it is set."""

    def __init__(self) -> None:
        self.in_grace = anyio.Event()
        self.grace_over = anyio.Event()
        self._looks = anyio.Semaphore(0)

    def look(self) -> None:
        """Have the owner look into the inbox once."""
        self._looks.release()

    async def sleep(self, seconds: float) -> None:
        if seconds is LOOK_EVERY_S:  # and no other second
            await self._looks.acquire()
        elif seconds == GRACE:
            self.in_grace.set()
            await self.grace_over.wait()
        else:
            await anyio.sleep(seconds)


class HeldStore(FaultyStore):
    """`inner`, whose answer to the first write that `holds` is held back: `holding` is set then, `let_go` ends it.
    `looked` is set whenever the inbox has been read.
    """

    def __init__(self, inner: Store, holds: Callable[[tuple[Event, ...]], bool] = lambda _: False) -> None:
        super().__init__(inner)
        self.holding, self.let_go, self.looked = anyio.Event(), anyio.Event(), anyio.Event()
        self._holds = holds

    async def write(self, batch: Batch) -> None:
        await super().write(batch)
        if self._holds(batch.events) and not self.holding.is_set():
            self.holding.set()
            await self.let_go.wait()

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        try:
            return await super().list_notes(run_id, after)
        finally:
            self.looked.set()
