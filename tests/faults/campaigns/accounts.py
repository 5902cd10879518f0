"""Several processes, on one host or on two with a server, under one limit of requests that the store keeps for them.

The model's server has a real token bucket: it refills continuously, holds CAPACITY_S seconds of refill, and refuses
what it has no token for. The allowance is 60 % of what the processes could call. Judged from what the server saw, as
long as all processes have tasks: how many calls it refused, how much of the allowance was used, and how large the
smallest share was.

`python -m tests.faults.campaigns.accounts [--tasks N] [--kills N] [--postgres] [--planted]`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import anyio

from plait import DAG, ParallelRunner, PostgresStore, RateLimits, RunStatus, SQLiteStore, Task
from plait.backends import OpenAIBackend
from plait.runner.scheduling import account_ledger
from plait.runner.scheduling.own_limits import Demand, Grant, Units
from tests.faults.campaigns.report import Report, Scale
from tests.support import wire
from tests.support.stores.postgres import address, end_server, start_server

MEMBERS = 4
WIDTH = 8
"""The tasks at once of each process."""
CALL_S = 0.8
PER_SECOND = 0.6 * MEMBERS * WIDTH / CALL_S
CAPACITY_S = 2.0
SETTLED_S = 1.0
"""Seconds after the first call of the last process, from which the use is measured."""
TASKS: dict[Scale, int] = {"quick": 100, "nightly": 500}


@dataclass
class Bucket:
    """The server's own bucket, and what it has seen."""

    level: float = PER_SECOND * CAPACITY_S
    at: float = field(default_factory=time.monotonic)
    granted: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    refused: list[float] = field(default_factory=list[float])
    deaths: dict[str, tuple[int, anyio.Event]] = field(default_factory=dict[str, tuple[int, anyio.Event]])
    """The processes to be killed, each with the number of its calls after which it is."""

    async def answer(self, exchange: wire.Exchange) -> None:
        now, dialect = time.monotonic(), wire.ChatCompletions()
        self.level = min(PER_SECOND * CAPACITY_S, self.level + (now - self.at) * PER_SECOND)
        self.at = now
        if self.level < 1:
            self.refused.append(now)
            await dialect.error(429, "rate_limit_exceeded", "Rate limit reached", retry_after="1")(exchange)
            return
        self.level -= 1
        body = exchange.request.body
        self.granted.append((now, body["model"]))
        after, death = self.deaths.get(body["model"], (0, None))
        if death is not None and sum(model == body["model"] for _, model in self.granted) > after:
            death.set()
        await asyncio.sleep(CALL_S)
        answer = wire.events(dialect.parts("yes")) if body.get("stream") else dialect.whole("yes")
        await answer(exchange)


@dataclass(frozen=True)
class Told:
    """What the server saw while all processes had tasks."""

    calls: int
    refused: float
    """The share of the calls that were refused."""
    used: float
    """The share of the allowance that was used."""
    least: float
    """The share of the process with the fewest calls, in shares of an equal part."""
    kills: int
    failed: tuple[str, ...] = ()

    def violations(self) -> list[str]:
        found = list(self.failed)
        if self.refused > 0.01:
            found.append(f"refused: {self.refused:.1%} of {self.calls} calls, more than 1 %")
        if self.used < 0.95:
            found.append(f"used: {self.used:.1%} of the allowance, less than 95 %")
        if self.least < 0.8:
            found.append(f"starved: a process got {self.least:.0%} of an equal share, less than 80 %")
        return found


async def play(tasks: int, *, kills: int = 0, postgres: bool = False, bug: str = "", seed: int = 0) -> Told:
    """Let MEMBERS processes do `tasks` tasks each, and kill some of them; a killed one is resumed at once."""
    rng, bucket = random.Random(seed), Bucket()
    async with store_of(postgres) as store, wire.serve(bucket.answer) as server:
        failed: list[str] = []

        async def start(number: int) -> anyio.abc.Process:
            words = [str(number), store, server.url, str(tasks), bug]
            command = [sys.executable, "-m", "tests.faults.campaigns.accounts", "--member", *words]
            environment = {**os.environ, "OPENAI_API_KEY": "sk-of-the-team"}
            return await anyio.open_process(command, env=environment, stdout=None, stderr=None)

        async def keep(number: int) -> None:
            process = await start(number)
            if (death := bucket.deaths.get(f"member-{number}")) is not None:
                await death[1].wait()
                process.send_signal(signal.SIGKILL)
                await process.wait()
                process = await start(number)
            if await process.wait():
                failed.append(f"failed: process {number} ended with {process.returncode}")

        for number in rng.sample(range(MEMBERS), kills):
            bucket.deaths[f"member-{number}"] = rng.randint(tasks // 5, tasks // 2), anyio.Event()
        async with anyio.create_task_group() as group:
            for number in range(MEMBERS):
                group.start_soon(keep, number)
    return judge(bucket, kills, tuple(failed))


def judge(bucket: Bucket, kills: int, failed: tuple[str, ...]) -> Told:
    """Judge what the server saw from SETTLED_S on until the first process had no further call."""
    last = {model: at for at, model in bucket.granted}
    first = {model: at for at, model in reversed(bucket.granted)}
    begin, end = max(first.values()) + SETTLED_S, min(last.values())
    shares = Counter(model for at, model in bucket.granted if begin <= at <= end)
    calls = len(bucket.granted) + len(bucket.refused)
    granted = shares.total()
    return Told(
        calls,
        len(bucket.refused) / calls,
        granted / max(1e-9, (end - begin) * PER_SECOND),
        min(shares[f"member-{number}"] for number in range(MEMBERS)) / max(1, granted / MEMBERS),
        kills,
        failed,
    )


@asynccontextmanager
async def store_of(postgres: bool) -> AsyncGenerator[str]:
    """Yield the place of a store: a file, or a database of a server of its own."""
    with tempfile.TemporaryDirectory(prefix="plait-accounts-") as place:
        if not postgres:
            async with SQLiteStore(Path(place) / "runs.db"):
                pass
            yield str(Path(place) / "runs.db")
            return
        server = await asyncio.to_thread(start_server, Path(place))
        try:
            dsn = address(server)
            async with PostgresStore(dsn):
                pass
            yield dsn
        finally:
            await asyncio.to_thread(end_server, server)


async def member(number: int, place: str, url: str, tasks: int) -> None:
    """Be one of the processes."""
    store = PostgresStore(place) if "://" in place else SQLiteStore(place)
    backend = OpenAIBackend(f"member-{number}", base_url=f"{url}/v1")
    async with store:
        runner = ParallelRunner(
            backends={"api": backend},
            rates={"api": RateLimits(requests_per_minute=60 * PER_SECOND)},
            store=store,
            concurrency=WIDTH,
        )
        if await store.get_run(f"r{number}") is not None:
            run = await runner.resume(f"r{number}")
        else:
            dag = DAG([Task(f"t{task}", f"question {task}") for task in range(tasks)])
            run = await runner.run(dag, run_id=f"r{number}")
    if run.status is not RunStatus.COMPLETED:
        raise SystemExit(f"run {number} is {run.status}")


def _patched(function: Callable[[Demand, account_ledger.Row, float], Grant]) -> AbstractContextManager[object]:
    return mock.patch("plait.runner.engine.stored_ledger.book", function)


def _not_shared() -> AbstractContextManager[object]:
    """Each process keeps the limit alone."""
    own: account_ledger.Row = {}
    return _patched(lambda demand, _row, now: account_ledger.book(demand, own, now))


def _late() -> AbstractContextManager[object]:
    """A booking begins only after the one before, and a process uses it half a second late."""
    return _patched(lambda demand, row, now: replace(account_ledger.book(demand, row, now), delay=0.5))


def _unqueued() -> AbstractContextManager[object]:
    """A process that has to wait books nothing, and asks again: every other process seldom."""

    def book(demand: Demand, row: account_ledger.Row, now: float) -> Grant:
        tried = deepcopy(row)
        grant = account_ledger.book(demand, tried, now)
        if grant.delay > 0:
            return Grant(0.02 if int(sys.argv[2]) % 2 else 0.2, Units())  # the number of the process
        row.update(tried)
        return grant

    return _patched(book)


BUGS: Mapping[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "each process keeps the limit alone": (_not_shared, "refused"),
    "a grant is used half a second late": (_late, "used"),
    "a process that waits has no place in the line": (_unqueued, "starved"),
}
"""What plants each bug in a process, and the violation that it leads to."""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The processes on one file and on a server, with and without kills, and the planted bugs. A process that was
    killed needs seconds to start again, so that its share is judged over the whole number of tasks.
    """
    began, tasks = time.monotonic(), TASKS[scale]
    told: dict[str, Told] = {}
    for name, postgres in (("one host", False), ("a server", True)):
        told[name] = anyio.run(_played, tasks, 0, postgres, seed)
        told[f"{name}, kills"] = anyio.run(_played, TASKS["nightly"], 2, postgres, seed)
    return Report(
        method="accounts",
        unit="rounds",
        cases=len(told),
        violations=tuple(f"{name}: {line}" for name, one in told.items() for line in one.violations()),
        planted={bug: is_caught(bug) for bug in BUGS},
        seconds=time.monotonic() - began,
        figures={f"{name}: {what}": number for name, one in told.items() for what, number in _figures(one).items()},
    )


async def _played(tasks: int, kills: int, postgres: bool, seed: int) -> Told:
    return await play(tasks, kills=kills, postgres=postgres, seed=seed)


def _figures(told: Told) -> dict[str, float]:
    return {
        "calls": told.calls,
        "refused %": round(100 * told.refused, 2),
        "used %": round(100 * told.used, 1),
        "least share %": round(100 * told.least, 1),
        "kills": told.kills,
    }


def is_caught(bug: str) -> bool:
    """Return whether a round with the planted bug is found out, as what it is."""

    async def tried() -> Told:
        return await play(60, bug=bug)

    return any(line.startswith(BUGS[bug][1]) for line in anyio.run(tried).violations())


def main(arguments: list[str]) -> int:
    """Play a round, or the planted bugs; 0 if nothing broke, and every bug showed."""
    if arguments[:1] == ["--member"]:
        number, place, url, tasks, bug = arguments[1:]
        with BUGS[bug][0]() if bug else nullcontext():
            anyio.run(member, int(number), place, url, int(tasks))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.accounts", description=__doc__)
    parser.add_argument("--tasks", type=int, default=TASKS["quick"])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--planted", action="store_true")
    options: Any = parser.parse_args(arguments)
    if options.planted:
        caught = {bug: is_caught(bug) for bug in BUGS}
        for bug, seen in caught.items():
            print(f"{bug}: {'caught' if seen else 'NOT CAUGHT'}")
        return 0 if all(caught.values()) else 1
    told = anyio.run(_played, options.tasks, options.kills, options.postgres, options.seed)
    print(", ".join(f"{name}: {number:g}" for name, number in _figures(told).items()))
    for line in told.violations():
        print(line)
    return int(bool(told.violations()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
