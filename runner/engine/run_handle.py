"""`Run`: the handle of a live run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from plait.errors import PlaitError
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.event_feed import EventReader
from plait.runner.engine.live_run import LiveRun
from plait.statuses import RunStatus


class Run:
    """A run executing in the background of the caller, inside `async with runner.start(dag) as run:`.

    Execution begins when the block is entered. A normal exit from the block waits for the end of the run. An exception
    or a cancellation inside the block stops the run; `resume` can continue it later. All methods must be called from
    the event loop's thread. The first call of `stop` or `cancel` decides how the run ends.
    """

    def __init__(self, live: LiveRun, drive: Callable[[LiveRun], Awaitable[RunResult]]) -> None:
        self.run_id = live.run_id
        """The id of the run."""
        self._live = live
        self._drive = drive
        self._first_reader: EventReader | None = live.feed.reader()
        self._ended = anyio.Event()
        self._result: RunResult | None = None
        self._error: Exception | None = None
        self._group: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("a Run can be entered only once; start the DAG again for another run")
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._group is not None
        if isinstance(error, Exception):
            # The error of the block is raised unchanged, not inside a group; errors of the run are raised by `result`
            # alone.
            self.stop()
            await self._group.__aexit__(None, None, None)
            return None
        return await self._group.__aexit__(kind, error, trace)

    async def to_end(self) -> RunResult:
        """Execute the run in place of a block, without events, and return the result. Raises as `result`."""
        return await self._drive(self._live)

    def events(self) -> EventReader:
        """Return an iterator over the run's events, in order: `async for event in run.events()`.

        The iterator ends after the event that ends the run. The first call returns all events from the start; later
        calls return events from the moment of the call. A slow reader misses only task outputs; an `EventsDropped`
        event counts the missed outputs. Raises RuntimeError before the block is entered.
        """
        self._require_begun()
        reader, self._first_reader = self._first_reader, None
        return reader or self._live.feed.reader()

    @property
    def status(self) -> RunStatus:
        """The stored status of the run. The value changes once a change is stored; events report each change."""
        return self._live.feed.status

    def require_record(self) -> None:
        """Do not begin a new run whose creation cannot be stored: `result` then raises the StoreError, and nothing is
        called. Later failures of the store are not fatal. To be called before the block is entered.
        """
        self._live.requires_record = True

    @property
    def is_storing(self) -> bool:
        """Whether the execution has ended, and only its last changes are left to be stored. `stop` then ends the wait
        for a store that is away.
        """
        return self._live.on_late_end is not None

    async def result(self) -> RunResult:
        """Wait for the end of the run and return the result. Raises the errors of `ParallelRunner.run`.

        Cancelling the wait does not affect the run.
        """
        self._require_begun()
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _require_begun(self) -> None:
        if self._group is None:
            raise RuntimeError("the run has not begun; use it as `async with runner.start(dag) as run:`")

    def stop(self) -> None:
        """Stop the run now: start no further task, end the running attempts, store the state. `resume` continues the
        run. The cost of the ended attempts may be unknown.
        """
        self._live.end("stop")

    def cancel(self) -> None:
        """Cancel the run permanently: start no further task, and ask the running attempts to end (`cancel_requested`).

        The attempts may end by themselves for the `cancel_grace` of the runner, and are cut afterwards. Unfinished
        tasks are then marked as cancelled. `stop` cuts the attempts of a cancelled run at once. The cost of a cut
        attempt is the last cost reported by its backend (`Output.usage`).
        """
        self._live.cancel()

    async def _run(self) -> None:
        try:
            self._result = await self._drive(self._live)
        except Exception as error:
            self._error = error
        finally:
            if self._result is None and self._error is None:
                self._error = PlaitError(f"run {self.run_id} was interrupted before its end; resume the run")
            self._live.feed.close()
            self._ended.set()
