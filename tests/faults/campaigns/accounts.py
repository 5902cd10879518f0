"""Several processes, on one host or on two with a server, under one limit of requests that the store keeps for them.

The model's server has a real token bucket: it refills continuously, holds CAPACITY_S seconds of refill, and refuses
what it has no token for. The allowance is 60 % of what the processes could call. Judged from what the server saw, as
long as all processes have tasks: how many calls it refused, how much of the allowance was used, and how large the
smallest share was. Of processes of unequal priority, the allowance is 60 % of what those of the highest could call,
which begin last: judged is what they get, as long as they have tasks.

`python -m tests.faults.campaigns.accounts [--tasks N] [--kills N] [--postgres] [--unequal] [--planted]`
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
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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
CAPACITY_S = 2.0
SETTLED_S = 1.0
"""Seconds after the first call of the last process, from which the use is measured."""
TASKS: dict[Scale, int] = {"quick": 100, "nightly": 500}
EQUAL, UNEQUAL = (0,) * MEMBERS, (0, 5)
"""The priorities of the processes."""


def per_second(ranks: Sequence[int]) -> float:
    """Return the allowance of processes of these priorities: 60 % of what those of the highest one could call."""
    return 0.6 * ranks.count(max(ranks)) * WIDTH / CALL_S


@dataclass
class Bucket:
    """The server's own bucket, and what it has seen."""

    per_second: float
    level: float = 0.0
    at: float = field(default_factory=lambda: time.monotonic() - CAPACITY_S)
    granted: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    refused: list[float] = field(default_factory=list[float])
    deaths: dict[str, tuple[int, anyio.Event]] = field(default_factory=dict[str, tuple[int, anyio.Event]])
    """The processes to be killed, each with the number of its calls after which it is."""
    begun: dict[str, anyio.Event] = field(default_factory=lambda: defaultdict(anyio.Event))
    """Of each process, whether it has called."""

    async def answer(self, exchange: wire.Exchange) -> None:
        now, dialect = time.monotonic(), wire.ChatCompletions()
        self.level = min(self.per_second * CAPACITY_S, self.level + (now - self.at) * self.per_second)
        self.at = now
        if self.level < 1:
            self.refused.append(now)
            await dialect.error(429, "rate_limit_exceeded", "Rate limit reached", retry_after="1")(exchange)
            return
        self.level -= 1
        body = exchange.request.body
        self.granted.append((now, body["model"]))
        self.begun[body["model"]].set()
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
    """The share of the process with the fewest calls, in shares of an equal part; of those of the highest priority in
    all calls, if there are others.
    """
    kills: int
    failed: tuple[str, ...] = ()
    ranks: Sequence[int] = EQUAL

    def violations(self) -> list[str]:
        found = list(self.failed)
        if self.refused > 0.01:
            found.append(f"refused: {self.refused:.1%} of {self.calls} calls, more than 1 %")
        if self.used < 0.95:
            found.append(f"used: {self.used:.1%} of the allowance, less than 95 %")
        if len(set(self.ranks)) > 1:
            if self.least < 0.9:
                found.append(f"passed over: the highest priority got {self.least:.0%} of the calls, less than 90 %")
        elif self.least < 0.8:
            found.append(f"starved: a process got {self.least:.0%} of an equal share, less than 80 %")
        return found


async def play(
    tasks: int,
    *,
    kills: int = 0,
    postgres: bool = False,
    bug: str = "",
    seed: int = 0,
    ranks: Sequence[int] = EQUAL,
) -> Told:
    """Let processes of these priorities do `tasks` tasks each, and kill some; a killed one is resumed at once."""
    rng, bucket = random.Random(seed), Bucket(per_second(ranks))
    async with store_of(postgres) as store, wire.serve(bucket.answer) as server:
        failed: list[str] = []

        async def start(number: int) -> anyio.abc.Process:
            words = [str(number), store, server.url, str(tasks), str(bucket.per_second), str(ranks[number]), bug]
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

        for number in rng.sample(range(len(ranks)), kills):
            bucket.deaths[f"member-{number}"] = rng.randint(tasks // 5, tasks // 2), anyio.Event()
        async with anyio.create_task_group() as group:
            for number, rank in enumerate(ranks):
                if rank > ranks[0]:
                    await bucket.begun[f"member-{number - 1}"].wait()
                group.start_soon(keep, number)
    return judge(bucket, kills, tuple(failed), ranks)


def judge(bucket: Bucket, kills: int, failed: tuple[str, ...], ranks: Sequence[int]) -> Told:
    """Judge what the server saw from SETTLED_S on until a process of the highest priority had no further call."""
    highest = [f"member-{number}" for number, rank in enumerate(ranks) if rank == max(ranks)]
    last = {model: at for at, model in bucket.granted if model in highest}
    first = {model: at for at, model in reversed(bucket.granted)}
    begin, end = max(first.values()) + SETTLED_S, min(last.values())
    shares = Counter(model for at, model in bucket.granted if begin <= at <= end)
    calls = len(bucket.granted) + len(bucket.refused)
    granted = shares.total()
    return Told(
        calls,
        len(bucket.refused) / calls,
        granted / max(1e-9, (end - begin) * bucket.per_second),
        min(shares[model] for model in highest) / max(1, granted / len(highest)),
        kills,
        failed,
        ranks,
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


async def member(number: int, place: str, url: str, tasks: int, rate: float, rank: int) -> None:
    """Be one of the processes."""
    store = PostgresStore(place) if "://" in place else SQLiteStore(place)
    backend = OpenAIBackend(f"member-{number}", base_url=f"{url}/v1")
    async with store:
        runner = ParallelRunner(
            backends={"api": backend},
            rates={"api": RateLimits(requests_per_minute=60 * rate)},
            priority=rank,
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


def _not_ahead() -> AbstractContextManager[object]:
    """A process takes its turn whoever waits."""
    return mock.patch.object(account_ledger, "_wait_for_others", return_value=0.0)


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


BUGS: Mapping[str, tuple[Callable[[], AbstractContextManager[object]], str, Sequence[int]]] = {
    "each process keeps the limit alone": (_not_shared, "refused", EQUAL),
    "a grant is used half a second late": (_late, "used", EQUAL),
    "a process that waits has no place in the line": (_unqueued, "starved", EQUAL),
    "a process of a lower priority does not wait for others": (_not_ahead, "passed over", UNEQUAL),
}
"""What plants each bug in a process, the violation that it leads to, and the priorities with which it shows."""


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The processes on one file and on a server, with and without kills, and the planted bugs. A process that was
    killed needs seconds to start again, so that its share is judged over the whole number of tasks.
    """
    began, tasks = time.monotonic(), TASKS[scale]
    told: dict[str, Told] = {}
    for name, postgres in (("one host", False), ("a server", True)):
        told[name] = anyio.run(_played, tasks, 0, postgres, seed)
        told[f"{name}, kills"] = anyio.run(_played, TASKS["nightly"], 2, postgres, seed)
        told[f"{name}, unequal"] = anyio.run(_played, TASKS["quick"], 0, postgres, seed, UNEQUAL)
    return Report(
        method="accounts",
        unit="rounds",
        cases=len(told),
        violations=tuple(f"{name}: {line}" for name, one in told.items() for line in one.violations()),
        planted={bug: is_caught(bug) for bug in BUGS},
        seconds=time.monotonic() - began,
        figures={f"{name}: {what}": number for name, one in told.items() for what, number in _figures(one).items()},
    )


async def _played(tasks: int, kills: int, postgres: bool, seed: int, ranks: Sequence[int] = EQUAL) -> Told:
    return await play(tasks, kills=kills, postgres=postgres, seed=seed, ranks=ranks)


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

    _, violation, ranks = BUGS[bug]

    async def tried() -> Told:
        return await play(60, bug=bug, ranks=ranks)

    return any(line.startswith(violation) for line in anyio.run(tried).violations())


def main(arguments: list[str]) -> int:
    """Play a round, or the planted bugs; 0 if nothing broke, and every bug showed."""
    if arguments[:1] == ["--member"]:
        number, place, url, tasks, rate, rank, bug = arguments[1:]
        with BUGS[bug][0]() if bug else nullcontext():
            anyio.run(member, int(number), place, url, int(tasks), float(rate), int(rank))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.accounts", description=__doc__)
    parser.add_argument("--tasks", type=int, default=TASKS["quick"])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--unequal", action="store_true")
    parser.add_argument("--planted", action="store_true")
    options: Any = parser.parse_args(arguments)
    if options.planted:
        caught = {bug: is_caught(bug) for bug in BUGS}
        for bug, seen in caught.items():
            print(f"{bug}: {'caught' if seen else 'NOT CAUGHT'}")
        return 0 if all(caught.values()) else 1
    ranks = UNEQUAL if options.unequal else EQUAL
    told = anyio.run(_played, options.tasks, options.kills, options.postgres, options.seed, ranks)
    print(", ".join(f"{name}: {number:g}" for name, number in _figures(told).items()))
    for line in told.violations():
        print(line)
    return int(bool(told.violations()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
