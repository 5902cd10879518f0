"""Drives a run for a person: shows it, and leaves it well when asked to by Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

import anyio
import anyio.abc

from runner import events
from runner.cli.exits import AT_ONCE
from runner.cli.plain import Display
from runner.result import RunResult
from runner.run import Run

_REFRESH = 0.2  # seconds
_SHOW_CURSOR = b"\x1b[?25h\n"


@dataclass(frozen=True, slots=True)
class Ending:
    """What a run came to, how many tasks this process ran for it, how many seconds it took, and what was added to it
    meanwhile.
    """

    result: RunResult
    ran: int = 0
    took: float = 0.0
    added: Sequence[events.TasksAdded] = ()


async def follow(run: Run, display: Display) -> Ending:
    """Start `run`, show it to its end, and say what it came to. Raises what `Run.result` raises."""
    began = time.monotonic()
    started: set[str] = set()
    added: list[events.TasksAdded] = []
    try:
        async with anyio.create_task_group() as beside:
            await beside.start(_stop_when_told, run, display)
            beside.start_soon(_tick, display)
            async with run:
                async for event in run.events():
                    if isinstance(event, events.TaskStarted):
                        started.add(event.task_id)
                    elif isinstance(event, events.TasksAdded):
                        added.append(event)
                    display.take(event)
            beside.cancel_scope.cancel()
    finally:
        display.close()
    return Ending(await run.result(), len(started), time.monotonic() - began, added)


async def _tick(display: Display) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        display.tick()


async def _stop_when_told(run: Run, display: Display, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    """The first signal stops the run, the second one the process."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            # From here on not through the event loop: a function of the user's may be what blocks it.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, _leave_at_once)
            display.note("stopping, and writing down where the run stands; once more to leave at once")
            run.stop()
            await anyio.sleep_forever()


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        os.write(2, _SHOW_CURSOR)
    os._exit(AT_ONCE)
