"""`Commit`: a one-shot event with callbacks, which any number of asyncio tasks can wait for.

anyio's Event works on every event loop, but creating an Event and waiting for the Event take three times as long, once
for each task of a run. The runner requires asyncio anyway: see asyncio_cancellation.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio.lowlevel


class Commit:
    """A submission to the store, set once the submission is stored or the store is known to be away."""

    __slots__ = ("_calls", "_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._calls: list[Callable[[], None]] = []
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> Awaitable[None]:
        """Wait until `set` is called. Cancellable.

        If already set, still yield to the event loop once, so that a caller in a loop does not starve other tasks.
        """
        if self._is_set:
            return anyio.lowlevel.checkpoint()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` during `set`, or at once if already set. `call` must not raise."""
        if self._is_set:
            call()
        else:
            self._calls.append(call)

    def set(self) -> None:
        """Make all calls registered with `then`, then wake the waiting tasks."""
        self._is_set = True
        for call in self._calls:
            call()
        self._calls.clear()
        for future in self._waiting:
            if not future.done():  # a cancelled future is done
                future.set_result(None)
        self._waiting.clear()


COMMITTED = Commit()
"""A commit that is set from the start."""
COMMITTED.set()
