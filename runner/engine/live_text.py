"""The text of answers while backends write them, for any number of readers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import anyio

from plait import events
from plait.json_form import value


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
