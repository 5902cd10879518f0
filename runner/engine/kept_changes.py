"""The last stored changes of a run, kept to be written again.

A server may lose changes that it had acknowledged: a standby is promoted before it has received the last ones. Only the
run's owner still has the changes. They are kept in whole batches, for KEPT_S seconds and up to KEPT_BYTES.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from plait.events import Event

KEPT_S = 600.0
"""Seconds for which a stored change is kept."""
KEPT_BYTES = 64 << 20
"""Most bytes of kept changes, about."""


@dataclass(frozen=True, slots=True)
class _KeptBatch:
    at: float
    """The time of the clock at which the batch was stored."""
    changes: tuple[Event, ...]
    size: int


class KeptChanges:
    """The last changes that the store has acknowledged, without a gap."""

    def __init__(self) -> None:
        self._batches: deque[_KeptBatch] = deque()
        self._size = 0
        self._next_seq = 1

    def add(self, first_seq: int, changes: tuple[Event, ...], now: float) -> None:
        """Keep `changes`, the first of which has the number `first_seq`, and drop what is too old or too much."""
        if first_seq != self._next_seq:
            self._batches.clear()
            self._size = 0
        batch = _KeptBatch(now, changes, sum(map(_size_of, changes)))
        self._batches.append(batch)
        self._size += batch.size
        self._next_seq = first_seq + len(changes)
        while self._batches and (self._size > KEPT_BYTES or self._batches[0].at < now - KEPT_S):
            self._size -= self._batches.popleft().size

    def take_from(self, seq: int) -> tuple[Event, ...] | None:
        """Return the kept changes from number `seq` on, and drop all kept changes; None if some are not kept."""
        changes = tuple(chain.from_iterable(batch.changes for batch in self._batches))
        count = self._next_seq - seq
        if not 0 < count <= len(changes):
            return None
        self._batches.clear()
        self._size, self._next_seq = 0, seq
        return changes[len(changes) - count :]


_FIXED = 200
"""Bytes of a change without its texts, about."""


def _size_of(change: object) -> int:
    size = _FIXED
    for name in getattr(change, "__dataclass_fields__", ()):
        one: object = getattr(change, name)
        if type(one) is str:
            size += len(one)
        elif type(one) is tuple:
            size += sum(map(_size_of_item, one))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return size


def _size_of_item(one: object) -> int:
    return len(one) if isinstance(one, str) else _size_of(one)
