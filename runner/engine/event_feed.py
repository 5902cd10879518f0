"""The delivery of a run's events to readers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from weakref import ref

import anyio

from plait import events
from plait.statuses import RunStatus


class EventReader:
    """An iterator over a run's events, in order, from the creation of the reader to the event that ends the run.

    Up to `limit` events wait for a slow reader; beyond the limit, task outputs are dropped and counted in an
    EventsDropped. If several asyncio tasks iterate over the same reader, each event goes to exactly one task.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._waiting: deque[events.Event] = deque()
        self._limit = limit
        self._dropped = 0
        self._news = anyio.Event()
        self._closed = False

    def put(self, event: events.Event) -> None:
        """Append an event. Never waits."""
        if isinstance(event, events.TaskOutput) and len(self._waiting) >= self._limit:
            self._dropped += 1
            return
        if self._dropped:
            self._waiting.append(events.EventsDropped(event.at, self._dropped))
            self._dropped = 0
        self._waiting.append(event)
        self._news.set()

    def take_waiting(self) -> list[events.Event]:
        """Return and remove the events that wait for this reader. Never waits."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def close(self) -> None:
        """End the iteration after the events already received."""
        self._closed = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[events.Event]:
        return self

    async def __anext__(self) -> events.Event:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._news.is_set():  # otherwise other tasks already wait for this event object
                self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.popleft()


class Feed:
    """The publisher of a run's events. Without readers, publishing costs nothing."""

    def __init__(self) -> None:
        self._readers: tuple[ref[EventReader], ...] = ()
        """Weak references: dropping the last reference to a reader frees the reader and the waiting events."""
        self._ended = False
        self.status = RunStatus.QUEUED
        """The status of the run according to the published events."""

    def reader(self) -> EventReader:
        """Return a new reader of the events published from now on."""
        reader = EventReader()
        self._readers = (*self._readers, ref(reader, self._remove))
        if self._ended:
            reader.close()
        return reader

    @property
    def has_readers(self) -> bool:
        """Whether anybody reads the events: without readers, an event that is not stored need not be made."""
        return bool(self._readers)

    def publish(self, event: events.Event) -> None:
        """Pass `event` to every reader. Do nothing after the event that ends the run."""
        if self._ended:
            return
        for one in self._readers:
            if (reader := one()) is not None:
                reader.put(event)
        if not isinstance(event, events.TaskEvent):
            self._note(event)

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.RunEnded):
            self.status = event.status
            self.close()
        elif isinstance(event, events.RunCancelling):
            self.status = RunStatus.CANCELLING
        elif isinstance(event, events.RunStarted | events.RunResumed):
            self.status = RunStatus.RUNNING

    def close(self) -> None:
        """Close all readers, later readers included, because the run is over."""
        self._ended = True
        for one in self._readers:
            if (reader := one()) is not None:
                reader.close()

    def _remove(self, gone: ref[EventReader]) -> None:
        # A new tuple, not a shorter list: a reader may be collected at any moment, even while `publish` iterates.
        self._readers = tuple(one for one in self._readers if one is not gone)
