"""Workers that have nothing to do, until they are handed a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import anyio.abc

from plait.backends.ask import answering
from plait.runner.engine.attempt import Attempt


class WorkerPool:
    """Where the workers of one run wait. Waking one costs a fifth of making a new one, which does `work`, for a turn or
    for None, in the group `workers`.
    """

    def __init__(self, work: Callable[[Attempt | None], Coroutine[None, None, None]]) -> None:
        self._work = work
        self.workers: anyio.abc.TaskGroup | None = None
        self._waiting: list[asyncio.Future[Attempt | None]] = []

    async def wait(self) -> Attempt | None:
        """Wait to be handed a turn; None when there will be none."""
        handed: asyncio.Future[Attempt | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(handed)
        return await handed

    def hand_out(self, turns: Sequence[Attempt]) -> None:
        """Wake an idle worker for each turn, or make a new one."""
        for turn in turns:
            if not self._waiting:
                self._start(turn)
                continue
            handed = self._waiting.pop()
            if not handed.done():  # else it was cancelled, and so are all: nothing more is begun
                handed.set_result(turn)

    def keep_one(self) -> None:
        """Have a worker wait here, so that the run does not end."""
        if not self._waiting:
            self._start(None)

    def _start(self, turn: Attempt | None) -> None:
        assert self.workers is not None
        self.workers.start_soon(self._begin, turn)

    async def _begin(self, turn: Attempt | None) -> None:
        with answering(()):  # once, and not for each turn
            await self._work(turn)

    def let_go(self) -> None:
        """There will be nothing more for those who wait now: nothing is handed to them from here on."""
        for handed in self._waiting:
            if not handed.done():
                handed.set_result(None)
        self._waiting.clear()
