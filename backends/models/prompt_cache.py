"""Beginnings that prompts have in common, so that the server reads them from its cache instead of anew.

A server stores the beginning of a prompt once its answer begins. Requests with the same beginning that are sent at the
same time all pay for it, so the first of them is sent alone, and the others wait for the first event of its answer.

Beginnings are compared at 4,096 characters and then at lengths that grow by a quarter, which finds at least 80 % of
what two prompts have in common. OpenAI and Anthropic store no less than 1,024 tokens, for some models 4,096, and keep
them for at least 5 minutes after the last use (https://platform.openai.com/docs/guides/prompt-caching,
https://docs.claude.com/en/docs/build-with-claude/prompt-caching).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from plait.backends.running_turn import cancel_requested, when_cancelled
from plait.errors import BackendError, ErrorKind

SHORTEST = 4096
"""Length of the shortest beginning worth sharing, in characters: about 1,024 tokens."""
_KEPT_S = 240.0
"""Seconds for which a beginning counts as stored after its last use."""
PATIENCE_S = 30.0
"""Longest wait for the first event of another request, in seconds."""


class _Beginning:
    """A beginning that at least one request has."""

    __slots__ = ("answered", "is_stored", "requests", "used_at")

    def __init__(self) -> None:
        self.is_stored = False
        self.answered: anyio.Event | None = None
        """Set once the request that goes ahead is being answered or has ended; None if no request is ahead."""
        self.requests = 0
        self.used_at = 0.0


class PromptCache:
    """The beginnings of the requests to one server. `needs_marks` if the server stores only marked beginnings."""

    def __init__(self, *, needs_marks: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.needs_marks = needs_marks
        self._monotonic = monotonic
        self._beginnings: dict[int, _Beginning] = {}
        """By hash, the last used at the end."""

    def register(self, keys: Sequence[int]) -> list[_Beginning]:
        """Return the beginnings of a request. `keys` are their hashes, the shortest beginning first."""
        now = self._monotonic()
        for key, beginning in list(self._beginnings.items()):
            if now - beginning.used_at < _KEPT_S:
                break
            del self._beginnings[key]
        beginnings: list[_Beginning] = []
        for key in keys:
            earlier = self._beginnings.pop(key, None)
            beginning = _Beginning() if earlier is None else earlier
            self._beginnings[key] = beginning
            beginning.requests += 1
            beginning.used_at = now
            beginnings.append(beginning)
        return beginnings

    def stored(self, keys: Sequence[int]) -> set[int]:
        """Return those of `keys` whose beginnings are stored."""
        return {key for key in keys if key in self._beginnings and self._beginnings[key].is_stored}


class SharedBeginning:
    """The context in which a request is sent, with the beginning that its prompt shares with other prompts.

    Entering waits until the longest beginning that other requests have is stored, at most for `patience` seconds.
    Raises BackendError if the run is being cancelled meanwhile: nothing is sent then. `text` is the whole prompt;
    `variant` stands for options that are part of what the server stores, such as a schema. A request that `repeats` the
    prompt of an earlier one reads what is stored, and neither waits nor counts as another request. `on_wait` is called
    before a wait.
    """

    __slots__ = ("_cache", "_found", "_led", "_on_wait", "_patience", "_repeats", "_text", "_variant", "length")

    def __init__(
        self,
        cache: PromptCache,
        text: str,
        *,
        variant: str = "",
        repeats: bool = False,
        patience: float = PATIENCE_S,
        on_wait: Callable[[], None],
    ) -> None:
        self.length = 0
        """Length in characters of the longest beginning in common with another request; 0 if there is none."""
        self._cache = cache
        self._text = text
        self._variant = variant
        self._repeats = repeats
        self._patience = patience
        self._on_wait = on_wait
        self._found: list[tuple[int, _Beginning]] = []
        """The beginnings of the prompt, and their lengths."""
        self._led: list[tuple[_Beginning, anyio.Event]] = []
        """The beginnings with which this request goes ahead, and their events."""

    def begin(self) -> None:
        """Let the requests go that wait for this beginning: the first event of the answer has arrived."""
        for length, one in self._found:
            if length <= self.length or not self._cache.needs_marks:
                one.is_stored = True
                if one.answered is not None:
                    one.answered.set()
                    one.answered = None
        self._end()

    async def __aenter__(self) -> Self:
        lengths, keys = self._keys()
        if self._repeats:
            stored = self._cache.stored(keys)
            self.length = max((length for length, key in zip(lengths, keys, strict=True) if key in stored), default=0)
            return self
        self._found = list(zip(lengths, self._cache.register(keys), strict=True))
        await self._wait()
        for _, one in self._found:
            if not one.is_stored and one.answered is None:
                one.answered = anyio.Event()
                self._led.append((one, one.answered))
        if self._found and len(self._led) == len(self._found):
            try:
                await anyio.lowlevel.checkpoint()  # requests that start together with this one are registered
            except BaseException:
                self._end()
                raise
        self.length = max((length for length, one in self._found if one.requests > 1), default=0)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._end()

    async def _wait(self) -> None:
        if self._request_ahead() is None:
            return
        self._on_wait()
        with anyio.move_on_after(self._patience) as scope, when_cancelled(scope.cancel):
            while (answered := self._request_ahead()) is not None:
                await answered.wait()
        if cancel_requested():
            raise BackendError(ErrorKind.TRANSIENT, "the run is being cancelled; the request was not sent")

    def _request_ahead(self) -> anyio.Event | None:
        """Return the event of the longest beginning with a request ahead; None if a longer beginning is stored."""
        for _, one in reversed(self._found):
            if one.is_stored:
                return None
            if one.answered is not None:
                return one.answered
        return None

    def _keys(self) -> tuple[list[int], list[int]]:
        """Return the lengths of the compared beginnings, and their hashes."""
        key = hash((id(asyncio.get_running_loop()), self._variant))  # an event belongs to a loop
        lengths, keys, start, length = list[int](), list[int](), 0, SHORTEST
        while length <= len(self._text):
            key = hash((key, self._text[start:length]))
            lengths.append(length)
            keys.append(key)
            start, length = length, length + length // 4
        return lengths, keys

    def _end(self) -> None:
        for one, answered in self._led:
            answered.set()
            if one.answered is answered:
                one.answered = None
        self._led, self._found = [], []
