"""Common parts of all measurements: a call without costs, the number of concurrent calls, and the clock."""

from __future__ import annotations

import asyncio
import gc
import resource
import time

ANSWER = "x" * 200
AT_ONCE = 256


async def body(_prompt: str) -> str:
    """Return ANSWER after one turn of the event loop."""
    await asyncio.sleep(0)  # any real call waits and returns to the event loop
    return ANSWER


def spent() -> tuple[float, float]:
    """Return the wall time and the CPU time of this process in seconds, after a garbage collection."""
    gc.collect()  # otherwise the imported objects would be scanned during some measurements only
    return time.perf_counter(), time.process_time()


def figures(before: tuple[float, float], tasks: int) -> dict[str, float]:
    """Return the figures of a run of `tasks` tasks since `before`, a return value of `spent`."""
    wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall_s": wall, "us_per_task": wall / tasks * 1e6, "cpu_us_per_task": cpu / tasks * 1e6, "peak_mib": peak}
