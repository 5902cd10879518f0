"""Telling our own cancellation from somebody else's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio


def require_asyncio() -> None:
    """Raise RuntimeError on any other event loop, such as trio's: stores and backends are made for this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("plait needs asyncio's event loop: asyncio.run(main()), or anyio.run(main)") from None


def cancels() -> int:
    """How often somebody has asked for the running task's end, by a cancel scope or natively."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def cancelled_since(before: int) -> bool:
    """Whether the running task itself is being cancelled, if `cancels` was `before` when what was awaited began.

    False when a CancelledError merely came out of that, such as a task of the backend's own that somebody cancelled: it
    is a failure like any other, and must not pass for the end of the run.
    """
    return cancels() > before


def forget_cancels_since(before: int) -> None:
    """For a task of ours that has called a backend: one that has cancelled that task and caught this itself, as
    home-made time-outs do, must not have it taken for cancelled from then on. A cancelled scope cancels it again.
    """
    task = asyncio.current_task()
    while task is not None and task.cancelling() > before:
        task.uncancel()


@contextmanager
def outlasting_cancellation() -> Generator[None]:
    """For a task that ends when it is told so, and not before: a native cancellation, such as the end of `asyncio.run`
    has for every task, ends what is waited for in the block, and nothing else. That of a scope would come again.
    """
    before = cancels()
    try:
        yield
    except asyncio.CancelledError:
        if not cancelled_since(before) or anyio.current_effective_deadline() == -math.inf:
            raise
        forget_cancels_since(before)
