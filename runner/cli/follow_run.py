"""A run shown to a person while it goes on, and stopped in order on Ctrl-C, SIGTERM or SIGHUP. At its end the result is
printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from plait import events
from plait.errors import PlaitError
from plait.json_form import value
from plait.persistence.store_protocol import Store
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.run_report import (
    Display,
    PlainDisplay,
    Progress,
    exit_code,
    print_failure,
    print_result,
    print_result_json,
    print_summary,
)
from plait.runner.cli.terminal_output import as_line
from plait.runner.domain.run_result import RunResult
from plait.runner.domain.wait_reasons import Limits
from plait.runner.engine.live_run import Run, state_of
from plait.runner.engine.run_options import StorePlace
from plait.runner.scheduling.slots import Concurrency
from plait.runner.state.run_state import RunState
from plait.runner.state.stored_run import stored_run
from plait.runner.views.event_sentences import counted
from plait.runner.views.read_views import waiting_tasks
from plait.runner.views.view_models import QuestionView
from plait.statuses import RunStatus

_REFRESH = 0.2  # seconds


@value
class OutputOptions:
    """Where a run is stored, and how its progress and result are shown."""

    store: StorePlace | None
    """The store; None to store nothing."""
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    logs: bool = False
    """Log lines are written, so no live display is shown."""
    concurrency: Concurrency | None = None
    """Number of tasks at once; None for the default."""
    result_of: str | None = None
    """Id of the task whose result is printed; None for the final tasks."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> OutputOptions:
        """Return the options of a command, given by the names of its parameters."""
        return cls(
            store=None if options.get("no_store") else options["store_path"],
            quiet=options.get("quiet", False),
            verbose=options.get("verbose", False),
            as_json=options["as_json"],
            logs=options["log_style"] is not None,
            concurrency=options.get("concurrency"),
        )


async def follow_run(run: Run, begin: RunState, options: OutputOptions, store: Store | None) -> int:
    """Show `run`, whose tasks are as in `begin` until it is prepared, to its end and print the result; `store` holds
    the run. Return the exit code. Raises StoreError, with nothing called, if the store cannot take a new run.
    """
    if store is not None:
        run.require_record()
    progress = Progress(
        begin, time.monotonic, Limits(total=None if options.concurrency == "auto" else options.concurrency)
    )
    result = as_stored(await _drive(run, progress, _make_display(progress, options)))
    try:
        if options.as_json:
            print_result_json(result, progress, options.store)
        else:
            print_result(progress.dag, result, options.result_of)
    finally:  # also if the result cannot be written: the summary says how to find it
        if not options.quiet:
            print_summary(result, progress, options.store, await _list_waiting(result, store))
        elif result.status is not RunStatus.COMPLETED:
            print_failure(result, options.store)
    return exit_code(result)


async def _list_waiting(result: RunResult, store: Store | None) -> list[QuestionView]:
    """Return the waiting tasks of the run, as far as the store can be read."""
    if store is None or not result.waiting:
        return []
    try:
        return waiting_tasks(await stored_run(store, result.run_id))
    except PlaitError:  # no store: the result has the questions as well
        return []


def _make_display(progress: Progress, options: OutputOptions) -> Display:
    if options.quiet:
        return Display()
    # Log lines and a live display would overwrite each other.
    if options.logs or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(verbose=options.verbose)
    from plait.runner.cli.live_display import LiveDisplay  # noqa: PLC0415 - rich takes long to import, and a pipe does not need it

    return LiveDisplay(progress, progress.dag.name or "plait", verbose=options.verbose)


async def _drive(run: Run, progress: Progress, display: Display) -> RunResult:
    """Start `run`, and show it to its end. Return its result. Raises as `Run.result`."""
    end: events.RunEnded | None = None

    def stop(*, is_shutdown: bool = False) -> None:
        progress.leave()
        run.stop(until_woken=is_shutdown)

    try:
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, stop, display.note, partial(stop, is_shutdown=True))
            beside.start_soon(_refresh_display, display)
            async with run:
                async for event in run.events():
                    progress.state = state_of(run) or progress.state
                    progress.handle(event)
                    if isinstance(event, events.RunEnded):
                        end = event
                    else:
                        display.handle(event)
            beside.cancel_scope.cancel()
        progress.took = progress.clock() - progress.began
        result = await run.result()
        if end is not None:  # told with the status that is stored, which is known only now
            display.handle(end if result.status_is_stored else events.RunInterrupted(end.at, end.run_id))
    finally:
        display.close()
    return result


async def _refresh_display(display: Display) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        display.tick()


def as_stored(result: RunResult) -> RunResult:
    """Return the result with the status that is stored: a run of which changes are lost has not ended in the store."""
    if result.status_is_stored:
        return result
    reason = [one.error for one in result.degraded if one.lost][-1]
    error = f"{counted(result.lost, 'change')} not stored: {as_line(reason, 300)}"
    return replace(result, status=RunStatus.INTERRUPTED, error=error)
