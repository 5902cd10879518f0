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


class Cancels:
    """How often somebody has asked for the running task's end, by a cancel scope or natively, from here on."""

    __slots__ = ("_before", "_task")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    @property
    def since(self) -> bool:
        """Whether the task itself is being cancelled.

        False when a CancelledError merely came out of what was awaited, such as a task of the backend's own that
        somebody cancelled: it is a failure like any other, and must not pass for the end of the run.
        """
        return self._task is not None and self._task.cancelling() > self._before

    def forget(self) -> None:
        """For a task of ours that has called a backend: one that has cancelled that task and caught this itself, as
        home-made time-outs do, must not have it taken for cancelled from then on. A cancelled scope cancels it again.
        """
        while self._task is not None and self._task.cancelling() > self._before:
            self._task.uncancel()


@contextmanager
def outlasting_cancellation() -> Generator[None]:
    """For a task that ends when it is told so, and not before: a native cancellation, such as the end of `asyncio.run`
    has for every task, ends what is waited for in the block, and nothing else. That of a scope would come again.
    """
    cancels = Cancels()
    try:
        yield
    except asyncio.CancelledError:
        if not cancels.since or anyio.current_effective_deadline() == -math.inf:
            raise
        cancels.forget()
