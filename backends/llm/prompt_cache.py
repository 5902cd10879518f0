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

SHORTEST = 4096
"""Length of the shortest beginning worth sharing, in characters: about 1,024 tokens."""
_KEPT_S = 240.0
"""Seconds for which a beginning counts as stored after its last use."""
_PATIENCE_S = 30.0
"""Longest wait for the first event of another request, in seconds."""


class _Beginning:
    """A beginning that at least one request has."""

    __slots__ = ("is_stored", "requests", "used_at")

    def __init__(self) -> None:
        self.is_stored = anyio.Event()
        """Set once the first request with the beginning is being answered, or has ended."""
        self.requests = 0
        self.used_at = 0.0


class PromptCache:
    """The beginnings of the requests to one server."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._beginnings: dict[int, _Beginning] = {}
        """By hash, the last used at the end."""

    def register(self, keys: Sequence[int]) -> list[_Beginning]:
        """Return the beginnings of a request. `keys` are their hashes, the shortest beginning first."""
        now = self._monotonic()
        self._forget(now)
        found: list[_Beginning] = []
        for key in keys:
            self._beginnings[key] = beginning = self._beginnings.pop(key, None) or _Beginning()
            beginning.requests += 1
            beginning.used_at = now
            found.append(beginning)
        return found

    def _forget(self, now: float) -> None:
        for key, beginning in list(self._beginnings.items()):
            if now - beginning.used_at < _KEPT_S:
                return
            del self._beginnings[key]


class SharedBeginning:
    """The context in which a request is sent, with the beginning that its prompt shares with other prompts.

    Entering waits until the longest beginning that other requests have is stored. `text` is the whole prompt; `variant`
    stands for options that are part of what the server stores, such as a schema.
    """

    __slots__ = ("_cache", "_led", "_text", "_variant", "length")

    def __init__(self, cache: PromptCache, text: str, variant: str) -> None:
        self.length = 0
        """Length in characters of the longest beginning in common with another request; 0 if there is none."""
        self._cache = cache
        self._text = text
        self._variant = variant
        self._led: list[_Beginning] = []
        """The beginnings that the answer to this request stores first."""

    def begin(self) -> None:
        """Let the requests go that wait for this one: the first event of the answer has arrived."""
        for beginning in self._led:
            beginning.is_stored.set()
        self._led.clear()

    async def __aenter__(self) -> Self:
        loop = id(asyncio.get_running_loop())  # an event belongs to a loop
        lengths, keys = list[int](), [hash((loop, self._variant))]
        length = SHORTEST
        while length <= len(self._text):
            keys.append(hash((keys[-1], self._text[lengths[-1] if lengths else 0 : length])))
            lengths.append(length)
            length += length // 4
        found = self._cache.register(keys[1:])
        self._led = [one for one in found if one.requests == 1]
        known = [one for one in found if one.requests > 1]
        try:
            if known:
                with anyio.move_on_after(_PATIENCE_S):
                    await known[-1].is_stored.wait()
            elif found:
                await anyio.lowlevel.checkpoint()  # requests that start together with this one are registered
        except BaseException:
            self.begin()
            raise
        self.length = max((length for length, one in zip(lengths, found, strict=True) if one.requests > 1), default=0)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.begin()
