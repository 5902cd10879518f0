"""Drives a run for a person: shows it, and leaves it well when asked to by Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

import anyio
import anyio.abc

from plait.backends.protocol import JsonValue
from plait.persistence import StoreError
from plait.persistence.protocol import Store
from plait.runner import PlaitError
from plait.runner.cli.display import report
from plait.runner.cli.display.plain import Display, NoDisplay, PlainDisplay
from plait.runner.cli.display.progress import Progress, grow
from plait.runner.cli.display.report import FinishedRun
from plait.runner.cli.exits import ABORTED
from plait.runner.cli.lookup import WaitingTask, list_waiting
from plait.runner.cli.options import OutputOptions
from plait.runner.domain import events
from plait.runner.domain.dag import DAG
from plait.runner.domain.result import RunResult
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.run import Run

_REFRESH = 0.2  # seconds
_SHOW_CURSOR = b"\x1b[?25h\n"


async def follow_run(
    run: Run, dag: DAG, options: OutputOptions, store: Store | None, statuses: Mapping[str, TaskStatus] | None = None
) -> int:
    """Show `run` to its end and say what it came to; the exit code. `store` is where the run is stored."""
    ending = await _drive(run, dag, _make_display(dag, options, statuses))
    result = ending.result
    try:
        if options.as_json:
            report.print_result_json(ending, options.store)
        else:
            report.print_result(ending.dag, result, options.result_of)
    finally:  # a result that cannot be written is to be found
        if not options.quiet:
            report.print_summary(ending, options.store, await _list_waiting(result, store))
        elif result.status is not RunStatus.COMPLETED:
            report.print_failure(result)
    return report.exit_code(result)


async def _list_waiting(result: RunResult, store: Store | None) -> list[WaitingTask]:
    """What the run's tasks wait for, as far as the store has it."""
    if store is None or not result.waiting:
        return []
    try:
        return await list_waiting(store, result.run_id)
    except (StoreError, PlaitError):  # it is away; the run's own record still has the questions
        return []


def _make_display(dag: DAG, options: OutputOptions, statuses: Mapping[str, TaskStatus] | None) -> Display:
    if options.quiet:
        return NoDisplay()
    # Log lines and a live display would write over each other.
    if options.logs or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(verbose=options.verbose)
    from plait.runner.cli.display.live import LiveDisplay  # noqa: PLC0415 - rich takes a while and is not needed in a pipe

    return LiveDisplay(Progress(dag, time.monotonic, statuses), dag.name or "plait", verbose=options.verbose)


async def _drive(run: Run, dag: DAG, display: Display) -> FinishedRun:
    """Start `run`, which begins with `dag`, show it to its end, and say what it came to. Raises as `Run.result`."""
    began, dag = time.monotonic(), dag.copy()
    started: set[str] = set()
    policy_state: JsonValue = None
    try:
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, run.stop, display.note)
            beside.start_soon(_refresh_display, display)
            async with run:
                async for event in run.events():
                    if isinstance(event, events.TaskStarted):
                        if not event.adopted:
                            started.add(event.task_id)
                    elif isinstance(event, events.TasksAdded):
                        grow(dag, event)
                    elif isinstance(event, events.PolicyDecided):
                        policy_state = event.state
                    display.handle(event)
            beside.cancel_scope.cancel()
    finally:
        display.close()
    return FinishedRun(await run.result(), dag, len(started), time.monotonic() - began, policy_state)


async def _refresh_display(display: Display) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        display.tick()


async def stop_on_signal(
    stop: Callable[[], None], note: Callable[[str], None], *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    """The first signal calls `stop`, the second one ends the process. One that is ignored from the start stays so: a
    script that starts plait in the background keeps the Ctrl-C for itself from it, and `nohup` the end of a terminal.
    """
    handled = [one for one in _SECOND_SIGNAL if signal.getsignal(one) != signal.SIG_IGN]
    stopping = False
    try:
        with anyio.open_signal_receiver(*handled) as signals:
            task_status.started()
            async for _ in signals:
                stopping = True
                # From here on not through the event loop: a function of the user's may be what blocks it.
                for number in handled:
                    signal.signal(number, _SECOND_SIGNAL[number])
                note("stopping, and writing down where the run stands; once more to leave at once")
                stop()
                await anyio.sleep_forever()
    finally:
        if stopping and signal.SIGHUP in handled:
            signal.signal(signal.SIGHUP, _ignore_hangup)


def _ignore_hangup(_number: int, _frame: FrameType | None) -> None:
    """A terminal that goes away says so more than once, through the kernel and through the shell; nobody is there who
    could mean that it takes too long.
    """


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        with suppress(OSError):
            os.write(2, _SHOW_CURSOR)
    os._exit(ABORTED)


_SECOND_SIGNAL = {signal.SIGINT: _exit_at_once, signal.SIGTERM: _exit_at_once, signal.SIGHUP: _ignore_hangup}
