"""What makes a store of a test one on a server, as far as a run can see."""

from __future__ import annotations

import anyio


class OnServer:
    """Mixed into a store: its owners look for notes every 20 ms, and no run is ever silent."""

    async def wait_for_note(self, _run_id: str) -> None:
        await anyio.sleep(0.02)

    async def silence(self, _run_id: str) -> float:
        return 0.0
