"""Cancellation: every public call over the real SQLite store, cancelled at each of its waits, in four ways.

A wait is any `await` of any task of the call at which it really waits. After each cancellation nothing may be left (no
open transaction, no task, no thread), nothing half-written, the run settled and without an owner; and a fresh store and
a fresh runner have to bring the run, once from each state that a cancellation leaves, to the very end that it would
have come to, executing no completed task again. `python -m tests.faults.campaigns.cancels CALL WAIT HOW` repeats one.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Final, cast, get_args

from plait import ParallelRunner
from plait.persistence import SQLiteStore
from tests.faults.campaigns.cancel_bugs import BUGS
from tests.faults.campaigns.cancel_calls import CALLS, RUN, Call, Scene, Server, Stage, prepare
from tests.faults.campaigns.cancel_checks import (
    come_to_its_end,
    files_left,
    half_written,
    open_transaction,
    outcome_of,
    standing,
    tasks_left,
    threads_left,
    unsettled,
)
from tests.faults.campaigns.planted import shows
from tests.faults.campaigns.report import Report, Scale
from tests.support.cancelling import HOWS, Cancelled, How
from tests.support.fakes import ShortDelays

MOST_VIOLATIONS = 20
SHOW_BUGS = ("SQLiteStore.write", "SQLiteStore.close", "resume after a crash", "run")
"""The calls that show the planted bugs."""
CONCURRENCY: Final[dict[Scale, tuple[int, ...]]] = {"quick": (2,), "nightly": (1, 2, 3)}
"""The calls are swept with runners of each: other orders, other waits."""

WAYS: Final[dict[Scale, int]] = {"quick": 1, "nightly": len(HOWS)}
"""The ways of cancelling at each wait. Fewer than all take turns from wait to wait."""


def run(*, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
    """Cancel everything everywhere, and, where wanted, look for the planted bugs."""
    began = time.monotonic()
    landed, states, violations = 0, 0, list[str]()
    for concurrency in CONCURRENCY[scale]:
        with Sweep(concurrency) as sweep:
            landed += sum(sweep.cancel_everywhere(name, WAYS[scale]) for name in CALLS)
            violations += sweep.violations
            states += sweep.states
    return Report(
        method="cancellation",
        unit="cancellations",
        cases=landed,
        violations=tuple(violations),
        planted={bug: is_caught(bug) for bug in BUGS} if planted else {},
        seconds=time.monotonic() - began,
        figures={"public calls": len(CALLS), "states resumed from": states},
    )


def is_caught(bug: str) -> bool:
    """Whether some cancellation shows the planted bug."""
    with Sweep(concurrency=2, most_violations=1) as sweep, BUGS[bug]():
        for name in SHOW_BUGS:
            sweep.cancel_everywhere(name, len(HOWS))
        return shows(sweep.violations)


class Sweep:
    """Cancels calls and looks at what is left; what must not be is added to `violations`. A context manager."""

    def __init__(self, concurrency: int, most_violations: int = MOST_VIOLATIONS) -> None:
        self.violations: list[str] = []
        self._most_violations = most_violations
        self._concurrency = concurrency
        self._numbers = 0
        self._folder = tempfile.TemporaryDirectory(dir=_memory_folder())
        self._level = 0
        self._gone_on_from = set[Hashable]()

    def __enter__(self) -> Sweep:
        log = logging.getLogger("plait")
        self._level = log.level
        log.setLevel(logging.CRITICAL)
        path = Path(self._folder.name)
        self._servers = {stage: asyncio.run(prepare(stage, path / f"{stage}.db")) for stage in get_args(Stage)}
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("plait").setLevel(self._level)
        self._folder.cleanup()

    @property
    def states(self) -> int:
        """How many different states the cancellations left."""
        return len(self._gone_on_from)

    def cancel_everywhere(self, name: str, ways: int) -> int:
        """Cancel the call at every wait in so many ways; how many cancellations landed."""
        landed, at, reached = 0, 1, True
        while reached and len(self.violations) < self._most_violations:
            cases = [self.cancel(name, at, HOWS[(at + way) % len(HOWS)]) for way in range(ways)]
            landed += sum(case.landed for case in cases)
            reached = any(case.waits >= at for case in cases)
            at += 1
        return landed

    def cancel(self, name: str, at: int, how: How) -> Cancelled:
        """Cancel the call at its wait number `at`, if it has so many."""
        call, cancelled = CALLS[name], Cancelled(at, how)
        self._numbers += 1
        path = Path(self._folder.name) / str(self._numbers) / "runs.db"
        path.parent.mkdir()
        if call.stage != "nothing":
            shutil.copy(Path(self._folder.name) / f"{call.stage}.db", path)
        before = set(threading.enumerate())
        try:
            wrong = asyncio.run(self._case(call, cancelled, path))
        except Exception as error:  # whatever escapes is a finding
            wrong = [f"{type(error).__name__}: {error}"]
        wrong += threads_left(before)
        repeat = f"python -m tests.faults.campaigns.cancels {name!r} {at} {how!r}"
        self.violations += [f"{name}, cancelled at wait {at} by {how}: {what} ({repeat})" for what in wrong[:1]]
        shutil.rmtree(path.parent)
        return cancelled

    async def _case(self, call: Call, cancelled: Cancelled, path: Path) -> list[str]:
        server = _unheld(self._servers[call.stage])
        store, found = SQLiteStore(path), None
        if call.opened:
            await store.__aenter__()
            found = await store.get_run(RUN)
        runner = ParallelRunner(server, store=store, concurrency=self._concurrency, rng=ShortDelays())
        scene = Scene(store, runner)
        await cancelled.call(lambda: _made(call, scene))
        wrong = outcome_of(cancelled) + tasks_left() + files_left(path)
        try:
            if call.open:
                await store.list_runs()  # when this answers, whatever the call began in the store's thread is over
            wrong += open_transaction(path)
        finally:
            if call.open:
                await store.close()
        async with SQLiteStore(path) as fresh:
            wrong += await half_written(fresh)
            record = await fresh.get_run(RUN)
            if record is not None and cancelled.how != "everything" and call.opened:
                wrong += unsettled(record, await fresh.list_tasks(RUN), found)
            stands = await standing(fresh, server)
            if stands in self._gone_on_from:
                return wrong
            self._gone_on_from.add(stands)
            return wrong + await come_to_its_end(fresh, server)


def _memory_folder() -> str | None:
    """No power is lost here, so nothing needs a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


async def _made(call: Call, scene: Scene) -> None:
    await call.make(scene)


def _unheld(server: Server) -> Server:
    """The server as it was left, ready to answer everything."""
    return Server(copy.copy(server.sessions), copy.copy(server.executed))


if __name__ == "__main__":
    with Sweep(concurrency=2) as one:
        one.cancel(sys.argv[1], int(sys.argv[2]), cast("How", sys.argv[3]))
        print("\n".join(one.violations) or "nothing wrong")
