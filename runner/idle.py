"""Workers that have nothing to do, until they are handed a turn."""

from __future__ import annotations

import asyncio

from runner.turn import Turn


class Idle:
    """Where the workers of one run wait. Waking one costs a fifth of making a new one."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[Turn | None]] = []

    async def wait(self) -> Turn | None:
        """Wait to be handed a turn; None when there will be none."""
        handed: asyncio.Future[Turn | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(handed)
        return await handed

    def hand(self, turn: Turn) -> bool:
        """Wake one of them for `turn`; False if there is none."""
        if not self._waiting:
            return False
        handed = self._waiting.pop()
        if not handed.done():  # else it was cancelled, and so are all: nothing more is begun
            handed.set_result(turn)
        return True

    def let_go(self) -> None:
        """There will be nothing more for those who wait now: nothing is handed to them from here on."""
        for handed in self._waiting:
            if not handed.done():
                handed.set_result(None)
        self._waiting.clear()
