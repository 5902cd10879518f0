"""Workers that have nothing to do, until they are handed a turn."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from runner.turn import Turn


@dataclass(slots=True)
class _Worker:
    wake: anyio.Event
    next: Turn | None = None


class Idle:
    """Where the workers of one run wait. Waking one costs a fifth of making a new one."""

    def __init__(self) -> None:
        self._waiting: list[_Worker] = []

    async def wait(self) -> Turn | None:
        """Wait to be handed a turn; None when there will be none."""
        worker = _Worker(anyio.Event())
        self._waiting.append(worker)
        await worker.wake.wait()
        return worker.next

    def hand(self, turn: Turn) -> bool:
        """Wake one of them for `turn`; False if there is none."""
        if not self._waiting:
            return False
        worker = self._waiting.pop()
        worker.next = turn
        worker.wake.set()
        return True

    def let_go(self) -> None:
        """There will be nothing more for those who wait now: nothing is handed to them from here on."""
        for worker in self._waiting:
            worker.wake.set()
        self._waiting.clear()
