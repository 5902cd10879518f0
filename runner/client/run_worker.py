"""A worker of a fleet: takes the runs of a store that no process executes, and executes them; and a process of its own
for one queued run.

A run that only waits for a time is parked, and taken again then. The store is the only thing that workers share. A
worker reads `Store.list_claimable` every POLL_S seconds and resumes the runs in it, as `plait resume` does. The claim
decides a race: the loser reads RunOwned and takes another run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from tempfile import TemporaryFile

import anyio

from plait import events
from plait.clock_and_ids import Clock
from plait.errors import PlaitError, RunOwned, StoreError
from plait.persistence.store_protocol import Store
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.engine.live_run import Run
from plait.runner.engine.run_options import STORE_VARIABLE, ServerAddress, StorePlace
from plait.runner.views.event_sentences import store_failures
from plait.safe_text import one_line
from plait.statuses import RunStatus

POLL_S = 1.0
"""Seconds between two reads of the claimable runs."""
AGAIN_S = 60.0
"""Seconds before a run that could not be executed here is tried again."""
NOT_DUE_S = 5.0
"""Seconds before a run that waits is tried again, if the run is due by the store's clock, not by ours."""
_CHOICE = 10
"""Number of the oldest runs of which a worker takes one at random, so that few workers want the same run."""
_PAGE = 50
_LOOK_S = 0.05
"""Seconds between two looks whether a process has a run."""


class Worker:
    """Executes the claimable runs of `store` until `stop`, at most `concurrency` at once.

    `files` replace stored backends, and name the folders of trusted plan files; for `lease` see `ParallelRunner`.
    `show` is called with the run and each of its events, of which the one that ends a run tells what is stored, and
    `note` with messages for a person.
    """

    def __init__(
        self,
        store: Store,
        concurrency: int,
        files: FileOptions,
        lease: float,
        *,
        show: Callable[[str, events.Event], None],
        note: Callable[[str], None],
    ) -> None:
        self._concurrency = concurrency
        self._of_store = TrustedBackends(store, files, lease=lease, park=True).runs()
        self._store = self._of_store.options.store or store  # with a time limit
        self._clock = Clock()
        self._runs: dict[str, Run | None] = {}
        """The runs that are executed here; None while the run is being prepared."""
        self._later: dict[str, float] = {}
        """Runs that are left alone for now, with the time on the clock of the next try."""
        self._stopping = False
        self._changed = anyio.Event()
        self._away = False
        self._show = show
        self._note = note

    async def work(self) -> None:
        """Execute runs until `stop` is called. Return once all runs are stored and released."""
        async with anyio.create_task_group() as group:
            while not self._stopping:
                self._changed = anyio.Event()
                for run_id in await self._choose():
                    self._runs[run_id] = None
                    group.start_soon(self._execute, run_id)
                with anyio.move_on_after(POLL_S):
                    await self._changed.wait()

    def stop(self) -> None:
        """Take no further run, and stop the runs under way. Each is stored, and free for other workers.

        A run that has ended is not stopped: that would end its wait for a store that is away.
        """
        self._stopping = True
        self._changed.set()
        for run in self._runs.values():
            if run is not None and not run.is_storing:
                run.stop()

    async def _choose(self) -> list[str]:
        """Return as many claimable runs as may begin now: first runs that were begun before, then queued runs."""
        free = self._concurrency - len(self._runs)
        if free <= 0:
            return []
        now = self._clock.monotonic()
        self._later = {run_id: at for run_id, at in self._later.items() if at > now}
        left_out = self._later.keys() | self._runs.keys()
        try:
            records = await self._store.list_claimable(_PAGE + len(left_out))
        except StoreError as error:
            if not self._away:
                self._note(f"the store does not answer; trying again every {POLL_S:g} s: {one_line(str(error))}")
            self._away = True
            return []
        self._away = False
        claimable = [run for run in records if run.run_id not in left_out]
        chosen: list[str] = []
        for is_queued in (False, True):
            oldest = [run.run_id for run in claimable if (RunStatus(run.status) is RunStatus.QUEUED) is is_queued]
            several = oldest[: max(_CHOICE, free)]
            chosen += random.sample(several, min(free - len(chosen), len(several)))
        return chosen

    async def _execute(self, run_id: str) -> None:
        try:  # as `plait resume`
            async with self._of_store.open(await self._of_store.read(run_id)) as (run, _):
                await self._follow(run)
        except RunOwned:  # another worker was faster
            self._later[run_id] = self._clock.monotonic() + POLL_S
        except Exception as error:  # a run that fails must not end the others
            why = str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"
            self._note(f"run {run_id} is left to other workers for {AGAIN_S:g} s: {one_line(why)}")
            self._later[run_id] = self._clock.monotonic() + AGAIN_S
        finally:
            del self._runs[run_id]
            self._changed.set()

    async def _follow(self, run: Run) -> None:
        if self._stopping:
            return
        self._runs[run.run_id] = run
        begins, end = False, None
        async with run:
            async for event in run.events():
                begins |= isinstance(event, events.RunStarted | events.RunResumed)
                if isinstance(event, events.RunEnded):
                    end = event
                else:
                    self._show(run.run_id, event)
        result = await run.result()
        if end is not None:  # which status is stored is known only now
            self._show(run.run_id, end if result.status_is_stored else events.RunInterrupted(end.at, end.run_id))
        for line in store_failures(result):
            self._note(line)
        if result.status is RunStatus.INTERRUPTED:
            self._later[run.run_id] = self._clock.monotonic() + AGAIN_S
        elif not begins or result.status is RunStatus.PARKED:
            self._later[run.run_id] = self._clock.monotonic() + NOT_DUE_S


async def start_process(run_id: str, store: Store, place: StorePlace, *, park: bool) -> tuple[int, str] | None:
    """Start a process in a session of its own that executes the queued run, and return None once a process has the run.
    If the process ends before, its exit code is returned, and what it said.
    """
    environment = {**os.environ, STORE_VARIABLE: place.dsn if isinstance(place, ServerAddress) else str(place)}
    words = [sys.executable, "-m", "plait", "resume", run_id, "-q", *(["--park"] if park else [])]
    with TemporaryFile() as errors:
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, errors.fileno(), 2),
        ]
        pid = os.posix_spawn(sys.executable, words, environment, file_actions=files, setsid=True)  # noqa: ASYNC221 - asyncio would end it with the loop
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 - it does not wait
            record = await store.get_run(run_id)
            if record is None or RunStatus(record.status) is not RunStatus.QUEUED:
                return None
            if ended:
                errors.seek(0)
                return os.waitstatus_to_exitcode(status), errors.read().decode(errors="replace").strip()
            await anyio.sleep(_LOOK_S)
