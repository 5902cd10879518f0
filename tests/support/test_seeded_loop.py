"""The seeded event loop: what it is for, shown on small programs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import anyio
import anyio.lowlevel
import pytest

from tests.support.seeded_loop import EPOCH, Stuck, VirtualClock, run_seeded


async def racy() -> bool:
    """One task takes for granted that what another does in one step is done after two of its own."""
    ready, came_too_early = False, False

    async def prepares() -> None:
        nonlocal ready
        await anyio.lowlevel.checkpoint()
        ready = True

    async def relies() -> None:
        nonlocal came_too_early
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        came_too_early = not ready

    async with anyio.create_task_group() as group:
        group.start_soon(prepares)
        group.start_soon(relies)
    return came_too_early


def test_an_ordering_bug_that_the_stock_loop_hides_shows() -> None:
    assert not any(asyncio.run(racy()) for _ in range(20))
    assert 20 < sum(run_seeded(racy, seed) for seed in range(200)) < 200


async def trace() -> str:
    """Who came when, with groups, time-outs, ties and cancellations."""
    seen: list[str] = []

    async def worker(name: int) -> None:
        try:
            with anyio.move_on_after(3):
                for step in range(4):
                    await anyio.sleep(step)
                    seen.append(f"{name}.{step}@{asyncio.get_running_loop().time():.6f}")
        except asyncio.CancelledError:
            seen.append(f"{name} cancelled")
            raise

    async with anyio.create_task_group() as group:
        for name in range(8):
            group.start_soon(worker, name)
        await anyio.sleep(2.5)
        group.cancel_scope.cancel()
    return " ".join(seen)


def test_a_seed_gives_the_same_run_in_every_process() -> None:
    here = [run_seeded(trace, seed) for seed in range(5)]
    code = "from tests.support.test_seeded_loop import *; print(*[run_seeded(trace, s) for s in range(5)], sep='\\n')"
    there = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True
        )
        .stdout.decode()
        .splitlines()
        for salt in ("1", "2")
    ]
    assert there == [here, here]
    assert len(set(here)) == 5


def test_a_deadlock_is_reported_at_once_with_who_waits_where() -> None:
    async def waits_for_ever() -> None:
        await anyio.Event().wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(waits_for_ever, name="the one who waits")

    began = time.monotonic()
    with pytest.raises(Stuck, match=r"nothing can run any more: .*the one who waits at .*waits_for_ever:\d+"):
        run_seeded(main, 0)
    assert time.monotonic() - began < 60


def test_what_never_ends_is_reported() -> None:
    async def spins() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    async def ticks() -> None:
        while True:  # noqa: ASYNC110 - like a lease that is renewed
            await anyio.sleep(10)

    with pytest.raises(Stuck, match="no end after"):
        run_seeded(spins, 0, limit_turns=1000)
    with pytest.raises(Stuck, match=r"no end after 3\d\d\d.* virtual seconds: .*ticks"):
        run_seeded(ticks, 0, limit_s=3600)


def test_virtual_hours_pass_in_no_time_and_time_outs_hold() -> None:
    async def main() -> float:
        clock = VirtualClock()
        await clock.sleep(5 * 3600)
        with pytest.raises(TimeoutError):
            with anyio.fail_after(3600):
                await anyio.sleep_forever()
        assert clock.wall() == EPOCH + clock.monotonic()
        assert VirtualClock(ahead=60).wall() == clock.wall() + 60
        return clock.monotonic()

    began = time.monotonic()
    assert run_seeded(main, 0) == pytest.approx(6 * 3600, abs=0.01)
    assert time.monotonic() - began < 60


def test_a_timer_and_a_result_of_the_same_moment_come_in_either_order() -> None:
    async def main() -> bool:
        answer = anyio.Event()
        asyncio.get_running_loop().call_later(1, answer.set)
        with anyio.move_on_after(1):
            await answer.wait()
            return True
        return False

    assert 20 < sum(run_seeded(main, seed) for seed in range(100)) < 80


def test_errors_and_cancellation_pass_through() -> None:
    async def fails() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run_seeded(fails, 3)
    assert caught.group_contains(ZeroDivisionError)
