"""Notifications of notes sent to running owners. A lost notification only delays the note: the owner reads its inbox
after `LONGEST_WAIT_S` seconds in any case.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import anyio

from plait.persistence.postgres.connection import connect

if TYPE_CHECKING:
    from plait.persistence.postgres.connection import Connection

CHANNEL: Final = "plait_notes"
KEPT_RUNS: Final = 10_000
"""Number of runs, the last waited for, whose notifications are kept until the next `wait`."""
LONGEST_WAIT_S: Final = 5.0
"""Seconds after which `wait` returns without a notification: connections can be lost unseen."""
_RETRY_S: Final = 1.0


def payload(run_id: str) -> str:
    """Return the text of a notification about the run. A payload is limited to 8,000 bytes, an id is not."""
    return str(crc32(run_id.encode()))


class Listener:
    """One connection that listens for the notes of all runs of a store. The first `wait` opens the connection."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._next_try = -math.inf
        """The time before which no connection is opened: a server may refuse each, or drop it at once."""
        self._arrived: OrderedDict[str, asyncio.Event] = OrderedDict()
        """An event for each run, by payload, the last waited for at the end. Set if a note may have arrived."""

    async def wait(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after `LONGEST_WAIT_S` seconds. The first call
        for a run, and the first call over a new connection, returns at once: earlier notes were not notified.
        """
        arrived = self._event_of(payload(run_id))
        try:
            await self._listen()
        except Exception:
            return  # the next try waits
        with anyio.move_on_after(LONGEST_WAIT_S):
            await arrived.wait()
        arrived.clear()

    def _event_of(self, run: str) -> asyncio.Event:
        arrived = self._arrived.get(run)
        if arrived is None:
            arrived = self._arrived[run] = asyncio.Event()
            arrived.set()
            if len(self._arrived) > KEPT_RUNS:  # a run whose owner still waits is added again by the next wait
                self._arrived.popitem(last=False)
        self._arrived.move_to_end(run)
        return arrived

    async def _listen(self) -> None:
        async with self._lock:
            if self._connection is not None and not self._connection.is_closed():
                return
            await anyio.sleep(max(0.0, self._next_try - anyio.current_time()))
            self._next_try = anyio.current_time() + _RETRY_S
            connection = await connect(self._dsn)
            try:
                await connection.add_listener(CHANNEL, self._notified)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
            self._wake_all()

    def _notified(self, _connection: Any, _pid: int, _channel: str, run: object) -> None:
        if arrived := self._arrived.get(str(run)):
            arrived.set()

    def _wake_all(self) -> None:
        for arrived in self._arrived.values():
            arrived.set()

    def close(self) -> None:
        """Drop the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
        self._wake_all()
