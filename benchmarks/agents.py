"""Costs of child processes for the parent: turns of an agent, many silent agents, and an agent with much output.

The children are small system programs, so that the figures contain the costs of plait only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from plait.backends.process.child_process import Child, Launch, child_environment, running

ANSWER = b'{"type": "text", "text": "A line as agents print them, with some words in it."}\n' * 20
GIGABYTE = f"import os\nfor _ in range(1024): os.write(1, {b'x' * 127 + bytes([10])!r} * 8192)"
FOR_EVER = 3600.0  # seconds


def _start(folder: Path, *argv: str, stdin: bytes = b"") -> Launch:
    return Launch(argv, child_environment(), folder, stdin)


async def _follow(child: Child) -> None:
    await child.follow(lambda _line: False, idle=FOR_EVER, until=anyio.current_time() + FOR_EVER)


async def agent_turns(turns: str = "100") -> dict[str, float]:
    """Measure turns (start, read a short answer, stop): first one after the other, then 20 at a time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        async def turn(number: int) -> None:
            async with running(_start(folder, "cat", stdin=ANSWER), folder / str(number)) as child:
                await _follow(child)

        await turn(0)
        before = time.process_time()
        for number in range(1, int(turns) + 1):
            await turn(number)
        each, before = time.process_time() - before, time.process_time()
        for first in range(int(turns) + 1, 2 * int(turns), 20):
            async with anyio.create_task_group() as group:
                for number in range(first, first + 20):
                    group.start_soon(turn, number)
        return {"cpu_ms": each / int(turns) * 1e3, "together_cpu_ms": (time.process_time() - before) / int(turns) * 1e3}


async def idle_agents(agents: str = "100", seconds: str = "5") -> dict[str, float]:
    """Measure the share of a core spent on following silent agents."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with AsyncExitStack() as open_turns, anyio.create_task_group() as group:
            for number in range(int(agents)):
                turn = running(_start(folder, "sleep", "600"), folder / str(number))
                group.start_soon(_follow, await open_turns.enter_async_context(turn))
            await anyio.sleep(5)
            wall, cpu = time.perf_counter(), time.process_time()
            await anyio.sleep(float(seconds))
            share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            group.cancel_scope.cancel()
    return {"percent": share * 100}


async def talkative_agent() -> dict[str, float]:
    """Measure the memory for reading a gigabyte of short lines from a child."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running(_start(folder, sys.executable, "-I", "-S", "-c", GIGABYTE), folder / "t") as child:
            before, cpu = _peak(), time.process_time()
            await _follow(child)
    return {"more_mib": _peak() - before, "cpu_s": time.process_time() - cpu}


def _peak() -> float:
    """Return the peak memory in MiB. `ru_maxrss` is not used: the value starts with the peak of the parent process."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


MEASURES: Mapping[str, Callable[..., Awaitable[dict[str, float]]]] = {
    one.__name__: one for one in (agent_turns, idle_agents, talkative_agent)
}
