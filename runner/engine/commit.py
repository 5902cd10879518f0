"""Something that happens once, for any number of tasks to wait for.

anyio's Event does the same on every event loop, and takes three times as long to be made and to be waited for, which
every task of a run is. The runner needs asyncio anyway: see cancelling.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio.lowlevel


class Commit:
    """One such thing."""

    __slots__ = ("_calls", "_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._calls: list[Callable[[], None]] = []
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> Awaitable[None]:
        """Wait for it. Where it has happened already, let other tasks run: who always finds it so must not starve them.
        Cancellable.
        """
        if self._is_set:
            return anyio.lowlevel.checkpoint()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def then(self, call: Callable[[], None]) -> None:
        """Call `call`, which must not raise, in the step in which it happens; at once where it has happened already."""
        if self._is_set:
            call()
        else:
            self._calls.append(call)

    def set(self) -> None:
        """It has happened: whoever waits goes on after all calls were made."""
        self._is_set = True
        for call in self._calls:
            call()
        self._calls.clear()
        for future in self._waiting:
            if not future.done():  # those that were cancelled are
                future.set_result(None)
        self._waiting.clear()


COMMITTED = Commit()
"""What has happened already."""
COMMITTED.set()
