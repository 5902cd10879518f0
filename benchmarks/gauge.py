"""What all measurements have in common: the call whose own cost is nothing, the number of places, and the clock."""

from __future__ import annotations

import asyncio
import gc
import resource
import time

ANSWER = "x" * 200
AT_ONCE = 256


async def body(_prompt: str) -> str:
    await asyncio.sleep(0)  # once back to the loop, as whatever waits for something does
    return ANSWER


def spent() -> tuple[float, float]:
    gc.collect()  # else what was imported would be looked through in the middle of some measurements, and of others not
    return time.perf_counter(), time.process_time()


def figures(before: tuple[float, float], tasks: int) -> dict[str, float]:
    wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"wall_s": wall, "us_per_task": wall / tasks * 1e6, "cpu_us_per_task": cpu / tasks * 1e6, "peak_mib": peak}
