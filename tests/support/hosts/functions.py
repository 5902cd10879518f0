"""Functions and a backend for hosts to import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import anyio
import anyio.lowlevel

from plait.backends import Billing, ConversationRequest, Price, Reply, Usage, ask
from plait.backends.backend_protocol import Allowance, Placeable
from plait.errors import BackendError, ErrorKind


async def echo(prompt: str) -> str:
    return f"re: {prompt}"


def host() -> str:
    """The name of the host of this process."""
    return Path(os.environ["XDG_STATE_HOME"]).name


async def where(_prompt: str) -> str:
    """The host on which the function runs."""
    return host()


_LAST: ContextVar[str] = ContextVar("_LAST", default="nobody")


async def set_variable(prompt: str) -> str:
    """Set a context variable to the prompt, and return the value before."""
    before = _LAST.get()
    _LAST.set(prompt)
    await anyio.lowlevel.checkpoint()
    assert _LAST.get() == prompt
    return before


async def until_file(path: str) -> str:
    """Begin a file beside `path`, and return once `path` is there."""
    _note(Path(f"{path}.begun"))
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - it is the test's doing
        await anyio.sleep(0.01)
    return "done"


async def awaiting_cancelled(path: str) -> str:
    """Await a task that is cancelled, once `until_file(path)` has begun."""
    await _begun(path)
    work = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(work.cancel)
    await work
    return "done"


async def asking_in_group(path: str) -> str:
    """Ask inside a task group, once `until_file(path)` has begun."""
    await _begun(path)
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(ask("which?"))
    return str(asked.result())


async def _begun(path: str) -> None:
    while not Path(f"{path}.begun").exists():  # noqa: ASYNC110, ASYNC240 - it is the test's doing
        await anyio.sleep(0.01)


def _note(path: Path) -> None:
    with path.open("a") as begun:
        begun.write(f"{os.getpid()}\n")


async def failing(_prompt: str) -> str:
    raise BackendError(ErrorKind.REFUSED, "not this one")


async def asking(prompt: str) -> str:
    print("a line that is no frame")
    return f"{prompt}: {await ask('which?')}"


@dataclass
class PricedBackend(Placeable):
    """A backend that reports its tokens without their cost, and knows their price."""

    session_id = None
    billing: ClassVar[Billing] = Billing(price=Price(input=1.0, output=10.0))

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, _request: ConversationRequest) -> AsyncGenerator[PricedBackend]:
        yield self

    async def send(self, prompt: str) -> Reply:
        return Reply(prompt, usage=Usage(1_000_000, 100_000, model="m"))


class LimitedBackend(PricedBackend):
    """A backend whose server reports its limits."""

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[PricedBackend]:
        assert request.on_allowance is not None
        request.on_allowance(Allowance(requests_per_minute=60.0))
        yield self
