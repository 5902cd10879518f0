"""The idle workers of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import anyio.abc

from plait.backends.ask import answering
from plait.runner.engine.attempt import Attempt


class WorkerPool:
    """The idle workers of one run, each of which waits for an attempt.

    A new worker runs `work(attempt)`, or `work(None)` to wait first, in the task group `workers`. Waking an idle worker
    costs a fifth of starting a new worker.
    """

    def __init__(self, work: Callable[[Attempt | None], Coroutine[None, None, None]]) -> None:
        self._work = work
        self.workers: anyio.abc.TaskGroup | None = None
        self._waiting: list[asyncio.Future[Attempt | None]] = []

    async def wait(self) -> Attempt | None:
        """Wait for an attempt and return the attempt; None if no further attempt follows. Cancellable."""
        handed: asyncio.Future[Attempt | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(handed)
        return await handed

    def assign(self, attempts: Sequence[Attempt]) -> None:
        """Wake an idle worker, or start a new worker, for each attempt."""
        for attempt in attempts:
            if not self._waiting:
                self._start(attempt)
                continue
            handed = self._waiting.pop()
            if not handed.done():  # a cancelled worker: all workers are being cancelled, so nothing more starts
                handed.set_result(attempt)

    def keep_one(self) -> None:
        """Keep at least one idle worker, so that the task group, and with the group the run, does not end."""
        if not self._waiting:
            self._start(None)

    def _start(self, attempt: Attempt | None) -> None:
        assert self.workers is not None
        self.workers.start_soon(self._begin, attempt)

    async def _begin(self, attempt: Attempt | None) -> None:
        with answering(()):  # once for each worker, not for each attempt
            await self._work(attempt)

    def release(self) -> None:
        """Let all idle workers return, because no further attempt follows for the idle workers."""
        for handed in self._waiting:
            if not handed.done():
                handed.set_result(None)
        self._waiting.clear()
