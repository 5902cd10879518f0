"""The rounds: `python -m tests.support.processes.contest_rounds KIND SABOTAGE SEED...` plays one a seed.

A process of its own without threads and without an open database, so that it may fork. Nobody waits for a race: all
stand at a gate that opens for all at once, and an owner stops itself (SIGSTOP) at its last moment before a write.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import cast

import anyio

from plait import ParallelRunner, Run
from plait.clock_and_ids import Clock
from plait.errors import Fenced, OwnershipLost
from plait.events import TaskCompleted
from plait.persistence import Batch, SQLiteStore
from tests.support.processes.contest import LEASE, PATIENCE, RUN, TASKS, Round, Sabotage, resumed, sabotaged
from tests.support.processes.forked import Child, Gate, lines_of

CONTENDERS = 20
DAY = 86_400.0  # seconds
LIVE_LEASE = 3 * LEASE
"""For an owner that must not seem dead on a busy machine; nobody waits for its end."""


def race(this: Round) -> None:
    """An owner dies; many processes resume its run at the same moment."""
    owner = Child(lambda _: anyio.run(_die, this, this.rng.randrange(1, 12)))
    this.facts.first_pid, this.facts.first = owner.pid, f"exit code {owner.wait()}"
    this.facts.before = this.take_stock()
    start, finish = Gate.shut(), Gate.shut()
    contenders = [
        Child(lambda say: anyio.run(_contend, this, start, finish, say), (start, finish)) for _ in range(CONTENDERS)
    ]
    assert len(lines_of(contenders, CONTENDERS, time.monotonic() + PATIENCE)) == CONTENDERS
    start.open()
    # The winner waits in its first task until all others were refused: had it been too quick, they would find it done.
    ended = lines_of(contenders, CONTENDERS - 1, this.deadline())
    finish.open()
    ended |= lines_of([child for child in contenders if child not in ended], CONTENDERS, this.deadline())
    this.facts.others = list(ended.values())
    for child in contenders:
        child.end()


async def _die(this: Round, calls: int) -> str:
    async def work(prompt: str) -> str:
        answer = this.call(prompt)
        if len(this.calls()) > calls:
            os.kill(os.getpid(), signal.SIGKILL)
        await anyio.sleep(0.001)
        return answer

    async with SQLiteStore(this.path) as store:
        return (await ParallelRunner(work, store=store, concurrency=3).run(this.dag, RUN)).status.value


async def _contend(this: Round, start: Gate, finish: Gate, say: Callable[[str], None]) -> str:
    async def work(prompt: str) -> str:
        answer = this.call(prompt)
        await finish.passed()
        return answer

    with sabotaged(this.sabotage):
        async with SQLiteStore(this.path, mode="existing") as store:
            say("ready")
            start.wait()
            return await resumed(ParallelRunner(work, store=store, concurrency=3))


def pause(this: Round) -> None:
    """An owner stops for longer than its lease, another takes the run over, and the first wakes up: while the second is
    at work, or when it is through.
    """
    while_at_work, first_gone = this.rng.random() < 0.5, Gate.shut()
    owner = Child(lambda _: anyio.run(_own, this, this.rng.randrange(3, 9), None), (first_gone,))
    this.facts.first_pid = owner.pid
    if not owner.wait_until_stopped():
        raise RuntimeError("the owner ended before it was to stop")
    this.facts.before = this.take_stock()
    woken = owner.pid if while_at_work else None
    second = Child(lambda _: anyio.run(_succeed, this, woken, first_gone), (first_gone,))
    if not while_at_work:
        this.facts.others = list(lines_of([second], 1, time.monotonic() + PATIENCE).values())
        owner.signal(signal.SIGCONT)
    this.facts.first = owner.line(this.deadline() + 3 * LEASE) or "never left"
    first_gone.open()
    if while_at_work:
        this.facts.others = list(lines_of([second], 1, this.deadline()).values())
    owner.end()
    second.end()


class _Stopping(SQLiteStore):
    """Stops the whole process before write number `stop_at`, at the last moment when another may come between."""

    def __init__(self, path: Path, stop_at: int | None, sabotage: Sabotage | None) -> None:
        super().__init__(path)
        self._stop_at = stop_at
        self._checks = sabotage == "epoch checked outside the transaction"
        self._writes = 0

    async def write(self, batch: Batch) -> None:
        if self._checks:
            run = await self.get_run(batch.run_id)
            if run is not None and run.epoch != batch.epoch:
                raise Fenced("the epoch is another one")
        self._writes += 1
        if self._writes == self._stop_at:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once, whichever thread this is
        await super().write(batch)


async def _own(this: Round, stop_at: int | None, end: Gate | None) -> str:
    """Run it, with a child process in task `hold`, which ends when `end` opens."""
    child_is_there = anyio.Event()

    async def work(prompt: str) -> str:
        answer = this.call(prompt)
        if prompt == "hold":
            async with await anyio.open_process(["sleep", "1000"]) as child:
                this.bear(child.pid)
                child_is_there.set()
                await (anyio.sleep_forever() if end is None else end.passed())
                child.kill()
        await child_is_there.wait()
        return answer

    async def follow(run: Run) -> None:
        async for event in run.events():
            if isinstance(event, TaskCompleted):
                this.tell(event.task_id)

    with sabotaged(None if this.sabotage == "lease by the wall clock" else this.sabotage):
        async with _Stopping(this.path, stop_at, this.sabotage) as store:
            runner = ParallelRunner(work, store=store, concurrency=3, lease=LEASE if end is None else LIVE_LEASE)
            ended = ""
            async with runner.start(this.dag, RUN) as run, anyio.create_task_group() as beside:
                beside.start_soon(follow, run)
                try:
                    ended = (await run.result()).status.value
                except OwnershipLost as error:
                    ended = f"OwnershipLost: {error}"
            return ended


async def _succeed(this: Round, woken: int | None, first_gone: Gate) -> str:
    """Take the run over as soon as its lease is over; wake process `woken` then, and work once it is gone."""

    async def work(prompt: str) -> str:
        answer = this.call(prompt)
        if woken is not None:
            os.kill(woken, signal.SIGCONT)
            await first_gone.passed()
        return answer

    with sabotaged("no epoch check" if this.sabotage == "no epoch check" else None):
        async with SQLiteStore(this.path, mode="existing") as store:
            await anyio.sleep(LEASE)
            return await resumed(ParallelRunner(work, store=store, concurrency=3, lease=LEASE))


def jump(this: Round) -> None:
    """An owner is alive and well; whoever wants its run has a clock that is a day ahead."""
    end = Gate.shut()
    owner = Child(lambda _: anyio.run(_own, this, None, end), (end,))
    this.facts.first_pid = owner.pid
    deadline = time.monotonic() + PATIENCE
    # It holds in its last task: a write of its own at the moment of the claim would have that refused all the same.
    while this.told() < TASKS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other = Child(lambda _: anyio.run(_come_from_tomorrow, this), (end,))
    this.facts.others = list(lines_of([other], 1, this.deadline()).values())
    end.open()
    this.facts.first = owner.line(this.deadline()) or "never left"
    owner.end()
    other.end()


class _Tomorrow(Clock):
    def wall(self) -> float:
        return super().wall() + DAY


async def _come_from_tomorrow(this: Round) -> str:
    async def work(prompt: str) -> str:
        return this.call(prompt)

    with sabotaged(this.sabotage):
        async with SQLiteStore(this.path, mode="existing") as store:
            return await resumed(ParallelRunner(work, store=store, lease=LIVE_LEASE, clock=_Tomorrow()))


KINDS = {"race": race, "pause": pause, "jump": jump}


def main() -> None:
    kind, sabotage, *seeds = sys.argv[1:]
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            this = Round(Path(folder), int(seed), cast("Sabotage", sabotage) if sabotage else None)
            KINDS[kind](this)
            print(json.dumps(asdict(this.finish())), flush=True)


if __name__ == "__main__":
    main()
