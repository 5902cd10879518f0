"""`Run`: the handle of a live run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus
from plait.runner.engine.feed import EventReader, Feed
from plait.runner.engine.run_control import Control
from plait.runner.errors import PlaitError


class Run:
    """A run going on beside the caller, inside `async with runner.start(dag) as run:`.

    Nothing runs before the block is entered. Leaving it waits for the run to end; leaving it with an exception, or
    being cancelled in it, stops the run so that `resume` can go on with it. All methods belong to the event loop's
    thread; of `stop` and `cancel` the first one called decides.
    """

    def __init__(self, run_id: str, drive: Callable[[Feed, Control], Awaitable[RunResult]]) -> None:
        self.run_id = run_id
        self._drive = drive
        self._feed = Feed()
        self._first_reader: EventReader | None = self._feed.reader()
        self._control = Control()
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
            # The block's own error goes on as it is, not inside a group: the run's errors come from `result` alone.
            self.stop()
            await self._group.__aexit__(None, None, None)
            return None
        return await self._group.__aexit__(kind, error, trace)

    def events(self) -> EventReader:
        """The run's events, in order, ending after the one that ends the run: `async for event in run.events()`.

        The first call gives all of them from the start, a later one those that come from then on. A reader that is
        slow loses nothing but task outputs, and is told how many. Raises RuntimeError before the block is entered.
        """
        self._require_begun()
        reader, self._first_reader = self._first_reader, None
        return reader or self._feed.reader()

    @property
    def status(self) -> RunStatus:
        """Where the run stands, as its store has it: it changes when the change is stored, and events tell of it."""
        return self._feed.status

    async def result(self) -> RunResult:
        """Wait for the end. Raises what `ParallelRunner.run` raises. Cancelling the wait leaves the run going."""
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
        """Leave the run now: start nothing more, end what is under way, write it down. `resume` goes on with it."""
        self._control.end("stop")

    def cancel(self) -> None:
        """Cancel the run for good: as `stop`, and every task that is not done becomes cancelled."""
        self._control.end("cancel")

    async def _run(self) -> None:
        try:
            self._result = await self._drive(self._feed, self._control)
        except Exception as error:
            self._error = error
        finally:
            if self._result is None and self._error is None:
                self._error = PlaitError(f"run {self.run_id} was left before its end; resume it to go on")
            self._feed.close()
            self._ended.set()
