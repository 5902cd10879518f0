"""A run's events on their way to those who read them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from weakref import ref

import anyio

from plait.runner.domain import events
from plait.runner.domain.status import RunStatus


class EventReader:
    """Reads a run's events from the moment it was made, in order, ending after the one that ends the run.

    Up to `limit` events wait for a slow reader; past that, task outputs are left out and counted in an EventsDropped.
    Where several read from the same one, each event goes to one of them.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._waiting: deque[events.Event] = deque()
        self._limit = limit
        self._dropped = 0
        self._news = anyio.Event()
        self._closed = False

    def put(self, event: events.Event) -> None:
        """Hand over one event. Never waits."""
        if isinstance(event, events.TaskOutput) and len(self._waiting) >= self._limit:
            self._dropped += 1
            return
        if self._dropped:
            self._waiting.append(events.EventsDropped(event.at, self._dropped))
            self._dropped = 0
        self._waiting.append(event)
        self._news.set()

    def close(self) -> None:
        """Nothing follows."""
        self._closed = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[events.Event]:
        return self

    async def __anext__(self) -> events.Event:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            if self._news.is_set():  # else others who read from here wait for it
                self._news = anyio.Event()
            await self._news.wait()
        return self._waiting.popleft()


class Feed:
    """Where a run's events are published; with no reader it costs nothing."""

    def __init__(self) -> None:
        self._readers: tuple[ref[EventReader], ...] = ()
        """Only looked at: whoever does not read on any more lets go of a reader and of what waits in it."""
        self._ended = False
        self.status = RunStatus.QUEUED
        """Where the run stands, as far as has been told."""

    def reader(self) -> EventReader:
        """A new reader of what comes from now on."""
        reader = EventReader()
        self._readers = (*self._readers, ref(reader, self._forget))
        if self._ended:
            reader.close()
        return reader

    def publish(self, event: events.Event) -> None:
        """Tell every reader; after the event that ends the run, nothing more is told."""
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
        """The run is over, however it ended."""
        self._ended = True
        for one in self._readers:
            if (reader := one()) is not None:
                reader.close()

    def _forget(self, gone: ref[EventReader]) -> None:
        # Another tuple, not a shorter list: this may happen at any moment, also while an event is handed out.
        self._readers = tuple(one for one in self._readers if one is not gone)
