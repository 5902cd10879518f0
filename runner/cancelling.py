"""Telling our own cancellation from somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


def being_cancelled() -> bool:
    """Whether the running task itself is being cancelled, by a cancel scope or natively.

    False when a CancelledError merely came out of something that it awaited, such as a task of the backend's own that
    somebody cancelled: that is a failure like any other, and must not pass for the end of the run.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextmanager
def outlasting_cancellation() -> Generator[None]:
    """For a task that ends when it is told so, and not before: a native cancellation, such as the end of `asyncio.run`
    has for every task, ends what is waited for in the block, and nothing else. Cancel scopes have to be shielded from.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    except asyncio.CancelledError:
        if task.cancelling() <= before:
            raise
        while task.cancelling() > before:
            task.uncancel()
