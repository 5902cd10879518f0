"""The delivery of a run's events to readers, and of the text of answers while a backend writes them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from weakref import ref

import anyio

from plait import events
from plait.json_form import value
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
        """Pass `event` to every reader, unless it is not shown. Do nothing after the event that ends the run."""
        if self._ended or not event.shown:
            return
        for reference in self._readers:
            if (reader := reference()) is not None:
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


@value
class TextPiece:
    """A piece of the text of a running attempt."""

    task_id: str
    """Id of the task."""
    attempt: int
    """Number of the attempt, from 1. A further attempt begins a new text."""
    offset: int
    """Number of characters of the text before the piece."""
    text: str
    """The piece."""


@dataclass(slots=True)
class _Text:
    attempt: int
    parts: list[str] = field(default_factory=list[str])
    length: int = 0


@dataclass(slots=True)
class _Sent:
    """The part of a text that a reader has received."""

    attempt: int
    parts: int = 0
    length: int = 0


class LiveText:
    """The texts of the running attempts of a run, for any number of readers. Readers never delay the run."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}
        self._news = anyio.Event()
        self._closed = False

    def take(self, event: events.Event) -> None:
        """Add the text of `event`, or drop the text of the task if `event` ends its attempt. The first text of a later
        attempt replaces the text.
        """
        if not isinstance(event, events.TaskEvent):
            return
        if not event.informs and not isinstance(event, events.TaskStarted | events.TaskOutput):
            self._texts.pop(event.task_id, None)
        elif isinstance(event, events.TaskOutput) and event.output == "text" and event.text:
            text = self._texts.get(event.task_id)
            if text is None or text.attempt != event.attempt:
                text = self._texts[event.task_id] = _Text(event.attempt or 0)
            text.parts.append(event.text)
            text.length += len(event.text)
            self._wake()

    def close(self) -> None:
        """End the readers."""
        self._closed = True
        self._wake()

    async def pieces(self) -> AsyncGenerator[TextPiece]:
        """Yield the texts of the running attempts up to now, then what follows. A slow reader receives fewer and longer
        pieces; the rest of an attempt that has ended meanwhile is left out.
        """
        sent: dict[str, _Sent] = {}
        while True:
            news = self._news
            for task_id, text in list(self._texts.items()):
                last = sent.get(task_id)
                if last is None or last.attempt != text.attempt:
                    last = sent[task_id] = _Sent(text.attempt)
                if text.length > last.length:
                    piece = TextPiece(task_id, text.attempt, last.length, "".join(text.parts[last.parts :]))
                    last.parts, last.length = len(text.parts), text.length
                    yield piece
            if self._closed:
                return
            await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()
