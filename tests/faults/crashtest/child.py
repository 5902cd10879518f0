"""The forked child: start or resume the run, record reported results in the ledger, and end at the given point."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import anyio

from plait import events, failpoints
from plait.clock_and_ids import Clock
from plait.errors import StoreError
from plait.persistence import SQLiteStore, Store
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.backend_call import only_error
from plait.runner.engine.live_run import Run
from plait.runner.parallel_runner import ParallelRunner
from plait.statuses import RunStatus, TaskStatus
from tests.faults.crashtest import ledger as words
from tests.faults.crashtest.cases import Case, CasePolicy, digest
from tests.faults.crashtest.fake_backend import KEEPS, FakeBackend
from tests.faults.crashtest.ledger import Ledger
from tests.faults.crashtest.snapshot import snapshot
from tests.faults.crashtest.trial import Point

if TYPE_CHECKING:
    from plait.persistence import PostgresStore

HASTE = 1000.0
"""The factor by which children shorten sleeps, so that retries and lease renewals come within milliseconds."""
LEASE_SECONDS = 12.0
"""The lease of children, in seconds of `HastyClock`: a renewal every 4 ms of real time."""
Fate = Literal["kill", "stop", "lose"]
"""The effect of a point: SIGKILL, SIGSTOP, or a StoreError in place of the store's answer."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """The start of one process of a trial."""

    folder: Path
    """The folder of the trial, shared by all processes of the trial."""
    case: Case
    """The case to run."""
    point: Point | None = None
    """The point at which `fate` takes effect; None for an undisturbed process."""
    fate: Fate = "kill"
    """`kill` sends SIGKILL, `stop` sends SIGSTOP, `lose` makes the store raise."""
    ahead: float = 0.0
    """The seconds by which the wall clock of the process is ahead of real time."""
    retry_failed: bool = False
    """As in `resume`."""
    only_open: bool = False
    """Only open and close the store."""
    plant: Callable[[], None] | None = None
    """Plants a bug before the run."""
    server: str | None = None
    """The address of a PostgreSQL database with tables; None for a SQLite file in `folder`."""
    run_id: str = "run"

    @property
    def ledger(self) -> Path:
        """The path of the ledger."""
        return self.folder / "ledger"

    @property
    def store(self) -> Path:
        """The path of the database."""
        return self.folder / "store" / "plait.db"


class HastyClock(Clock):
    """Real time with short sleeps."""

    def __init__(self, ahead: float) -> None:
        self._ahead = ahead

    def wall(self) -> float:
        return time.time() + self._ahead

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds / HASTE)


class Trap:
    """Counts the hits of every boundary, and applies the fate at one point."""

    def __init__(self, start: ProcessStart, ledger: Ledger) -> None:
        self.hits: Counter[str] = Counter()
        self._point, self._fate = start.point, start.fate
        self._ledger = ledger

    def __call__(self, name: str) -> None:
        self.hits[name] += 1
        point = self._point
        if point is None or name != point.name or self.hits[name] != point.hit:
            return
        self._ledger.write(words.REACH, name, point.hit)
        if self._fate == "lose":
            raise StoreError("the harness let the answer of the store get lost")
        # Signal the current thread: after a signal to the process, the thread would continue until any other thread
        # receives the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGKILL if self._fate == "kill" else signal.SIGSTOP)


def be_child(start: ProcessStart) -> NoReturn:
    """Run the child and end the process. Never returns: an error is written to the ledger, and the exit code is 1."""
    code = 1
    try:
        _redirect(start.folder / "output")
        ledger = Ledger(start.ledger)
        if start.plant is not None:
            start.plant()
        trap = Trap(start, ledger)
        failpoints.on_reach = trap
        anyio.run(_live, start, ledger)
        ledger.write(words.COUNT, trap.hits)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        what = only_error(error)
        Ledger(start.ledger).write(words.RAISED, os.getpid(), type(what).__name__, str(what))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)


async def _live(start: ProcessStart, ledger: Ledger) -> None:
    if start.server is None and not start.store.exists():
        await _no_store_is_made_to_resume(start, ledger)
    async with _opened(start) as store:
        if start.only_open:
            return
        stored = await store.get_run(start.run_id) is not None
        ledger.write(words.BEGIN, os.getpid(), "resume" if stored else "run")
        ledger.write(words.FOUND, await snapshot(store, start.run_id) if stored else None)
        runner = _runner(start, ledger, store)
        policy = None if start.case.reviewed is None else CasePolicy(start.case)
        run = (
            runner.start_resume(start.run_id, retry_failed=start.retry_failed, policy=policy)
            if stored
            else runner.start(start.case.dag, start.run_id, policy=policy)
        )
        result = await _run(run, ledger)
        while result.status is RunStatus.WAITING_INPUT:
            await _answer(runner, start.case, result, ledger)
            result = await _run(runner.start_resume(start.run_id, policy=policy), ledger)
        ledger.write(words.END, result.status.value, await snapshot(store, start.run_id, whole=True))


def _opened(start: ProcessStart) -> SQLiteStore | PostgresStore:
    if start.server is not None:
        from plait.persistence import PostgresStore

        return PostgresStore(start.server, mode="existing")
    return SQLiteStore(start.store, mode="existing" if start.store.exists() else "create")


async def _run(run: Run, ledger: Ledger) -> RunResult:
    async with run:
        await _listen(run, ledger)
    return await run.result()


async def _answer(runner: ParallelRunner, case: Case, result: RunResult, ledger: Ledger) -> None:
    for task in result.tasks.values():
        if task.status is TaskStatus.WAITING_INPUT:
            ledger.write(words.ANSWER, task.id)
            await runner.runs.settle(result.run_id, task.id, "fail" if case.part(task.id).crashes else "again")


async def _no_store_is_made_to_resume(start: ProcessStart, ledger: Ledger) -> None:
    try:
        async with SQLiteStore(start.store, mode="existing"):
            pass
    except StoreError:
        if not start.store.exists():
            return
    ledger.write(words.NOTE, "opening a missing store to go on with a run made a new, empty one")
    start.store.unlink(missing_ok=True)


def _runner(start: ProcessStart, ledger: Ledger, store: Store) -> ParallelRunner:
    case = start.case
    sessions = start.folder / "sessions"
    return ParallelRunner(
        backends={
            name: FakeBackend(case, ledger, sessions, KEEPS[i % len(KEEPS)]) for i, name in enumerate(case.backends)
        },
        default=case.backends[0],
        store=store,
        concurrency=case.concurrency,
        limits=case.limits,
        lease=LEASE_SECONDS,
        clock=HastyClock(start.ahead),
    )


async def _listen(run: Run, ledger: Ledger) -> None:
    async for event in run.events():
        told = _told(event)
        if told is not None:
            ledger.write(words.ACK, *told)


def _told(event: events.Event) -> tuple[Any, ...] | None:
    match event:
        case events.TaskCompleted():
            return event.task_id, "completed", digest(event.text, event.data)
        case events.TaskFailed():
            return event.task_id, event.status.value, ""
        case _:
            return None
