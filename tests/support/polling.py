"""Waiting for something that no event announces, such as the doings of a thread."""

from __future__ import annotations

from collections.abc import Callable

import anyio


async def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Return once `true()` is true. Raises TimeoutError after `seconds`."""
    with anyio.fail_after(seconds):
        while not true():  # noqa: ASYNC110 - no event announces it
            await anyio.sleep(0.001)
