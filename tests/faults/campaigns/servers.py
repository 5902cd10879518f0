"""A PostgreSQL server that dies during a run: `python -m tests.faults.campaigns.servers [TASKS [KILLS [SECONDS]]]`.

Three cases: the server is killed and started every half a second; the server dies and a standby that lags behind is
promoted; the server is away for SECONDS at the end of the run. In each case every task is completed by one call.
`--planted` plays the cases with the planted bugs of server_bugs.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from plait import ParallelRunner, PostgresStore, Run, RunResult
from tests.faults.campaigns.planted import try_planted
from tests.faults.campaigns.report import Report, Scale
from tests.faults.campaigns.server_bugs import BUGS, SHOWN
from tests.persistence.postgres.runs import dag
from tests.support.stores.postgres import address, end_server, kill, start_again, start_server
from tests.support.stores.standby import pair

TASKS = {"quick": 300, "nightly": 3000}
KILLS = {"quick": 3, "nightly": 30}
AWAY_S = {"quick": 2.0, "nightly": 60.0}
KILL_EVERY_S = 0.5
AT_ONCE = 20
_PATIENCE_S = 600.0
_SMALL = 60, 1, 0.5
"""Tasks, kills, and seconds at the end of a case with a planted bug."""


class Calls:
    """A backend as a function: counts its calls by prompt, and holds them at chosen numbers."""

    def __init__(self, seconds: float, *gates: int) -> None:
        self.by_prompt = Counter[str]()
        self._seconds = seconds
        self.reached = {number: anyio.Event() for number in gates}
        self.open = {number: anyio.Event() for number in gates}

    @property
    def count(self) -> int:
        return self.by_prompt.total()

    async def __call__(self, prompt: str) -> str:
        self.by_prompt[prompt] += 1
        for number, gate in self.open.items():
            if self.count > number:
                self.reached[number].set()
                await gate.wait()
        await anyio.sleep(self._seconds)
        return f"re: {prompt}"


@asynccontextmanager
async def started(dsn: str, calls: Calls, tasks: int) -> AsyncGenerator[Run]:
    async with (
        PostgresStore(dsn) as store,
        ParallelRunner(calls, store=store, concurrency=AT_ONCE).start(dag(tasks)) as run,
    ):
        yield run


async def violations(dsn: str, result: RunResult, calls: Calls, tasks: int) -> list[str]:
    """What is lost, or was called twice, by the result, the calls and the store."""
    async with PostgresStore(dsn, mode="read") as store:
        record = await store.get_run(result.run_id)
        attempts = await store.list_attempts(result.run_id)
    assert record is not None
    lost = sum(one.lost for one in result.degraded)
    twice = [prompt for prompt, count in calls.by_prompt.items() if count > 1]
    statuses = Counter(one.status for one in attempts)
    found = {
        f"the run ended as {result.status}, stored as {record.status}": record.status != "completed",
        f"{len(result.text)} of {tasks} results": len(result.text) != tasks,
        f"{lost} changes lost": lost > 0,
        f"called twice: {twice[:5]}": bool(twice),
        f"stored attempts: {dict(statuses)}": statuses != {"completed": tasks},
    }
    return [what for what, is_wrong in found.items() if is_wrong]


async def killed(tasks: int, kills: int) -> list[str]:
    """The server is killed with all its processes KILL_EVERY_S after each start, and the run goes on all the time."""
    parts = [tasks * number // (kills + 1) for number in range(1, kills + 1)]
    calls = Calls(0.0, *parts)
    with tempfile.TemporaryDirectory(prefix="plait-postgres-") as folder:
        server = await asyncio.to_thread(start_server, Path(folder) / "data")
        try:
            dsn = address(server)
            async with started(dsn, calls, tasks) as run:
                for number in parts:
                    await anyio.sleep(KILL_EVERY_S)
                    await asyncio.to_thread(kill, server)
                    calls.open[number].set()
                    await asyncio.to_thread(start_again, server)
                result = await run.result()
            return await violations(dsn, result, calls, tasks)
        finally:
            end_server(server)


async def failed_over(tasks: int) -> list[str]:
    """The standby is cut off in the first half of the run; later the primary dies, and the standby is promoted."""
    calls = Calls(0.0, tasks // 4, tasks * 3 // 4)
    cut, dies = calls.reached
    with pair() as servers:
        async with started(servers.dsn, calls, tasks) as run:
            await calls.reached[cut].wait()
            await servers.wait_until_equal()
            await servers.cut_standby_off()
            calls.open[cut].set()
            await calls.reached[dies].wait()
            await asyncio.to_thread(servers.fail_over)
            calls.open[dies].set()
            result = await run.result()
        wrong = await violations(servers.dsn, result, calls, tasks)
        return wrong if any("is next" in one.error for one in result.degraded) else [*wrong, "the standby lost nothing"]


async def away_at_the_end(tasks: int, seconds: float) -> list[str]:
    """The server is killed before the last answers, and started again after `seconds`."""
    calls = Calls(0.0, tasks - AT_ONCE)
    (last,) = calls.reached
    with tempfile.TemporaryDirectory(prefix="plait-postgres-") as folder:
        server = await asyncio.to_thread(start_server, Path(folder) / "data")
        try:
            dsn = address(server)
            async with started(dsn, calls, tasks) as run:
                await calls.reached[last].wait()
                await asyncio.to_thread(kill, server)
                calls.open[last].set()
                await anyio.sleep(seconds)
                await asyncio.to_thread(start_again, server)
                result = await run.result()
            return await violations(dsn, result, calls, tasks)
        finally:
            end_server(server)


def run(*, scale: Scale, seed: int = 0) -> Report:
    """The three cases, and the planted bugs."""
    return play(TASKS[scale], KILLS[scale], AWAY_S[scale], planted=True)


def play(tasks: int, kills: int, away_s: float, *, planted: bool = False) -> Report:
    """The three cases with runs of `tasks` tasks."""
    began = time.monotonic()
    cases = _cases(tasks, kills, away_s)
    wrong: list[str] = []
    for name, case in cases.items():
        with_limit = _within(_PATIENCE_S + away_s, case)
        wrong += [f"{name}: {what}" for what in asyncio.run(with_limit)]
    return Report(
        method="servers",
        unit="runs",
        cases=len(cases),
        violations=tuple(wrong),
        planted={bug: is_caught(bug) for bug in BUGS} if planted else {},
        seconds=time.monotonic() - began,
        figures={"tasks in each run": tasks, "kills": kills, "seconds away at the end": away_s},
    )


def _cases(tasks: int, kills: int, away_s: float) -> dict[str, Callable[[], Awaitable[list[str]]]]:
    return {
        "killed": lambda: killed(tasks, kills),
        "failed over": lambda: failed_over(tasks),
        "away at the end": lambda: away_at_the_end(tasks, away_s),
    }


def is_caught(bug: str) -> bool:
    """Whether the case of the planted bug shows the bug as what it is."""
    return SHOWN[bug].within(_play_with(bug))


def _play_with(bug: str) -> list[str]:
    """What is wrong with a small case in which the bug is planted."""
    with BUGS[bug]():
        return asyncio.run(_within(_PATIENCE_S, _cases(*_SMALL)[SHOWN[bug].case]))


async def _within(seconds: float, case: Callable[[], Awaitable[list[str]]]) -> list[str]:
    with anyio.move_on_after(seconds):
        return await case()
    return [f"not done after {seconds:g} s"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--planted"]:
        sys.exit(try_planted(SHOWN, _play_with))
    at_night = TASKS["nightly"], KILLS["nightly"], AWAY_S["nightly"]
    given = [int(number) for number in sys.argv[1:]]
    report = play(*given, *at_night[len(given) :])
    print(json.dumps(report.as_json(), indent=2))
    sys.exit(not report.ok)
