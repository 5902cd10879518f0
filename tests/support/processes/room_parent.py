"""A process that runs nasty children and is killed meanwhile; see `tests.support.processes.room.Parent`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
from anyio.to_thread import run_sync

from plait.backends.process.child_process import Child, Launch, child_environment, running, scratch
from tests.support.processes.room import LIFE, NASTY, PYTHON


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesBefore(subprocess.Popen[bytes]):
    def __init__(self, *words: Any, **options: Any) -> None:
        die()


class DiesAfter(subprocess.Popen[bytes]):
    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        die()


class DiesWithin(subprocess.Popen[bytes]):
    """When it has made the child's process, which is not the program yet."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options, preexec_fn=wait_to_start)


def wait_to_start() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    until = time.monotonic() + LIFE
    while not (Path(sys.argv[1]) / "start").exists() and time.monotonic() < until:
        time.sleep(0.001)


async def asked_to_end(child: Child, seconds: float) -> None:
    die()


async def main() -> None:
    folder, moment, guarded, held, *children = sys.argv[1:]
    dies = {"before the spawn": DiesBefore, "in the spawn": DiesWithin, "after the spawn": DiesAfter}
    subprocess.Popen = dies.get(moment, subprocess.Popen)  # type: ignore[misc]
    ready = 0

    async def run(position: int, name: str) -> None:
        nonlocal ready
        argv = (*PYTHON, str(NASTY), name, held)
        start = Launch(argv, child_environment(), Path(folder), b"", (int(held),), guarded=guarded == "1")
        async with running(start, Path(folder) / str(position)) as child:
            ended = moment in {"ended", "left"}
            await child.follow(lambda line: line == b"ready" and not ended, idle=60, until=anyio.current_time() + 60)
            ready += 1
            if moment == "stopping":
                Child.wait = asked_to_end  # type: ignore[method-assign]
            elif moment != "left":
                await wait_to_be_killed(len(children))

    async def wait_to_be_killed(all_of_them: int) -> None:
        if moment == "copied":
            copy(int(held))
        elif ready == all_of_them or moment == "one by one":
            print("kill me", flush=True)
        await anyio.sleep(LIFE)

    with use_scratch(Path(folder)) if guarded == "1" else nullcontext():
        async with anyio.create_task_group() as group:
            for position, name in enumerate(children):
                if moment == "one by one" and position:
                    await run_sync(sys.stdin.read)
                group.start_soon(run, position, name)
        print("kill me", flush=True)
        await anyio.sleep(LIFE)


@contextmanager
def use_scratch(folder: Path) -> Iterator[None]:
    """A temporary folder of ours in there, with something in it."""
    tempfile.tempdir = str(folder)
    with scratch() as ours:
        (ours / "file").touch()
        yield


def copy(held: int) -> None:
    """A copy of this process, as a pool of workers is, that outlives it."""
    born = os.fork()
    if not born:
        os.close(held)
        time.sleep(LIFE)
        os._exit(0)
    print(born, flush=True)


if __name__ == "__main__":
    anyio.run(main)
