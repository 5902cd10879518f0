"""Tasks that ask something while others go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from plait import DAG, Retry, Task
from plait.backends import ask

LATE = DAG([Task("a", "late"), Task("b", "so {{ a }}", depends_on=["a"]), Task("c", "beside")])


def asking(**how: Any) -> Callable[[str], Awaitable[Any]]:
    """A function that asks where its prompt is `late`, and gives the prompt back else."""

    async def work(prompt: str) -> Any:
        return await ask("Go?", **how) if prompt == "late" else prompt

    return work


class Held:
    """Work that asks for the prompt `late` and, for `hold`, goes on until `release` is called."""

    def __init__(self, **how: Any) -> None:
        self._how = how
        self._limiter = anyio.Event()

    async def __call__(self, prompt: str) -> Any:
        if prompt == "hold":
            await self._limiter.wait()
        return await ask("Go?", **self._how) if prompt == "late" else prompt

    def release(self, *_: object) -> None:
        self._limiter.set()


HOLDING = DAG([Task("a", "late", retry=Retry(attempts=1)), Task("hold", "hold"), Task("c", "beside")])
