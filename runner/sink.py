"""Where an execution hands on what happened: to the store's writer, or, without a store, to those who listen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio.lowlevel

from runner import events
from runner.feed import Feed


class Sink(Protocol):
    """Where an execution hands on what happened."""

    @property
    def away(self) -> bool:
        """Whether what is handed on does not get written down right now, though it should."""
        ...

    def submit(self, happened: Sequence[events.Event]) -> None:
        """Have `happened` stored in one transaction, then told. Never waits."""
        ...

    async def commit(self, happened: Sequence[events.Event]) -> None:
        """Submit, and return when it is durable, or when the store is known to be away. Cancellation ends the waiting
        alone: what was submitted is stored all the same.
        """
        ...


class NoStore:
    """The sink of a run that is not written down."""

    away = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def submit(self, happened: Sequence[events.Event]) -> None:
        """Tell it at once."""
        for event in happened:
            self._feed.publish(event)

    async def commit(self, happened: Sequence[events.Event]) -> None:
        """Tell it at once, and let other tasks run: backends that answer at once must not starve them."""
        self.submit(happened)
        await anyio.lowlevel.checkpoint()
