"""Distinguish cancellation of the current asyncio task from a `CancelledError` raised by an awaited task.

Signals such as Ctrl-C are handled in `cli/ctrl_c.py`, the cancelling of a run in `client/cancel_run.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio


def require_asyncio() -> None:
    """Raise RuntimeError unless an asyncio event loop is running. Stores and backends do not support other loops
    (trio).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("plait needs asyncio's event loop: asyncio.run(main()), or anyio.run(main)") from None


class Cancels:
    """Cancellation requests sent to the current task since construction, by a cancel scope or by `Task.cancel()`."""

    __slots__ = ("_before", "_task")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    @property
    def since(self) -> bool:
        """True if the current task itself has been cancelled since construction.

        False if only the awaited code raised CancelledError, such as a backend's own task cancelled by other code. An
        error of the latter kind is an ordinary failure and must not end the run.
        """
        return self._task is not None and self._task.cancelling() > self._before

    def withdraw(self) -> None:
        """Withdraw the recorded cancellation requests from the current task.

        Needed after a backend call: a home-made time-out may cancel the calling task and catch the error without
        calling `uncancel`, and the task would count as cancelled from then on. A cancelled scope delivers its
        cancellation again.
        """
        while self._task is not None and self._task.cancelling() > self._before:
            self._task.uncancel()


@contextmanager
def outlasting_cancellation() -> Generator[None]:
    """Absorb a native `Task.cancel()`, such as `asyncio.run` sends at shutdown.

    The await inside the block is interrupted and the task continues. Cancellation by a cancel scope is re-raised,
    because the scope would deliver the cancellation again.
    """
    cancels = Cancels()
    try:
        yield
    except asyncio.CancelledError:
        if not cancels.since or anyio.current_effective_deadline() == -math.inf:
            raise
        cancels.withdraw()
