"""Functions for hosts to import."""

from __future__ import annotations

import os
from pathlib import Path

import anyio

from plait.backends import BackendError, ErrorKind, ask


async def echo(prompt: str) -> str:
    return f"re: {prompt}"


async def where(_prompt: str) -> str:
    """The host on which the function runs."""
    return Path(os.environ["XDG_STATE_HOME"]).name


async def until_file(path: str) -> str:
    """Begin a file beside `path`, and return once `path` is there."""
    _note(Path(f"{path}.begun"))
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 - it is the test's doing
        await anyio.sleep(0.01)
    return "done"


def _note(path: Path) -> None:
    with path.open("a") as begun:
        begun.write(f"{os.getpid()}\n")


async def failing(_prompt: str) -> str:
    raise BackendError(ErrorKind.REFUSED, "not this one")


async def asking(prompt: str) -> str:
    print("a line that is no frame")
    return f"{prompt}: {await ask('which?')}"
