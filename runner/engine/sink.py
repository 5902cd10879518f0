"""Where an execution hands on what happened: to the store's writer, or, without a store, to those who listen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.runner.domain import events
from plait.runner.engine.commit import SET, Latch
from plait.runner.engine.feed import Feed


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run's next change goes: its epoch, to which each stored RunClaimed adds one, and its sequence number."""

    epoch: int = 0
    next_seq: int = 1


class Sink(Protocol):
    """Where an execution hands on what happened."""

    @property
    def away(self) -> bool:
        """Whether what is handed on does not get written down right now, though it should."""
        ...

    def submit(self, happened: Sequence[events.Event]) -> Latch:
        """Have `happened` stored in one transaction, then told. Never waits. What it gives is set when all that is
        durable, or the store is known to be away.
        """
        ...


class NoStore:
    """The sink of a run that is not written down."""

    away = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def submit(self, happened: Sequence[events.Event]) -> Latch:
        """Tell it at once."""
        for event in happened:
            self._feed.publish(event)
        return SET
