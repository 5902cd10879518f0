"""How often the connection that listens for notes is opened while the server refuses or drops it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from plait.persistence import postgres_connection
from plait.persistence.postgres_store import Listener
from tests.support.seeded_loop import run_seeded

MINUTE = 60


class Dropped:
    """A connection that the server closes at once."""

    async def add_listener(self, _channel: str, _call: Callable[..., None]) -> None:
        pass

    def is_closed(self) -> bool:
        return True

    def terminate(self) -> None:
        pass


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "dropped"])
@pytest.mark.parametrize("runs", [1, 5])
def test_the_connection_is_opened_once_a_second_at_most(
    refused: bool, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = 0

    async def connect(_dsn: str) -> Any:
        nonlocal opened
        opened += 1
        await anyio.lowlevel.checkpoint()
        if opened > 10 * MINUTE:
            await anyio.sleep_forever()
        if refused:
            raise ConnectionRefusedError("nobody listens")
        return Dropped()

    monkeypatch.setattr(postgres_connection, "connect", connect)

    async def main() -> None:
        notes = Listener("postgresql://me@host/db")

        async def own(run_id: str) -> None:
            while True:
                await notes.wait(run_id)

        with anyio.move_on_after(MINUTE):
            async with anyio.create_task_group() as owners:
                for number in range(runs):
                    owners.start_soon(own, f"r{number}")

    run_seeded(main, 1)
    assert MINUTE / 2 <= opened <= MINUTE + 1
