"""Telling our own cancellation from somebody else's."""

from __future__ import annotations

import asyncio


def being_cancelled() -> bool:
    """Whether the running task itself is being cancelled, by a cancel scope or natively.

    False when a CancelledError merely came out of something that it awaited, such as a task of the backend's own that
    somebody cancelled: that is a failure like any other, and must not pass for the end of the run.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
