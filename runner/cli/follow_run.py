"""Drives a run for a person: shows the run, and stops it in order on Ctrl-C, SIGTERM or SIGHUP."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol

import anyio

from plait import events
from plait.errors import PlaitError
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.cli import run_report
from plait.runner.cli.command_options import OutputOptions
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.run_report import FinishedRun
from plait.runner.cli.terminal_output import as_line, print_note
from plait.runner.cli.waiting_questions import list_waiting
from plait.runner.client.store_place import StorePlace, read_only_store
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import RunResult
from plait.runner.domain.wait_reasons import Limits
from plait.runner.engine.live_run import Run
from plait.runner.state.stored_run import grow
from plait.runner.views.event_sentences import event_line, is_detail
from plait.runner.views.view_models import QuestionView
from plait.statuses import RunStatus, TaskStatus
from plait.usage import lacks_price

_REFRESH = 0.2  # seconds


class Display(Protocol):
    """Shows a live run on standard error."""

    def handle(self, event: events.Event) -> None:
        """Show an event."""
        ...

    def note(self, text: str) -> None:
        """Print a message of plait."""
        ...

    def tick(self) -> None:
        """Refresh the display; called several times a second."""
        ...

    def close(self) -> None:
        """Restore the terminal after the last event."""
        ...


class NoDisplay:
    """Shows nothing."""

    def handle(self, event: events.Event) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay(NoDisplay):
    """Prints a line with the local time for every event; if `verbose`, also for tools, nodes and waits of tasks."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def handle(self, event: events.Event) -> None:
        if self._verbose or not (is_detail(event) or isinstance(event, events.RunCreated)):
            line = as_line(event_line(event))
            if line:
                print_note(f"{datetime.fromisoformat(event.at).astimezone():%H:%M:%S} {line}")

    def note(self, text: str) -> None:
        print_note(text)


async def follow_run(
    run: Run, dag: DAG, options: OutputOptions, store: Store | None, statuses: Mapping[str, TaskStatus] | None = None
) -> int:
    """Show `run` to its end and print the result; `store` holds the run. Return the exit code. Raises StoreError, with
    nothing called, if the store cannot take a new run.
    """
    if store is not None:
        run.require_record()
    ending = await _drive(run, dag, _make_display(dag, options, statuses))
    ending = replace(ending, result=run_report.as_stored(ending.result))
    result = ending.result
    try:
        if options.as_json:
            run_report.print_result_json(ending, options.store)
        else:
            run_report.print_result(ending.dag, result, options.result_of)
    finally:  # also if the result cannot be written: the summary says how to find it
        place = options.store if await _is_stored(result, options.store) else None
        if not options.quiet:
            run_report.print_summary(ending, place, await _list_waiting(result, store))
        elif result.status is not RunStatus.COMPLETED:
            run_report.print_failure(result, place)
    return run_report.exit_code(result)


async def _is_stored(result: RunResult, place: StorePlace | None) -> bool:
    """Return whether other commands find the run: a store that failed may be another one by now."""
    if place is None or not result.degraded:
        return place is not None
    try:
        async with read_only_store(place) as store:
            return await store.get_run(result.run_id) is not None
    except PlaitError:
        return False


async def _list_waiting(result: RunResult, store: Store | None) -> list[QuestionView]:
    """Return the waiting tasks of the run, as far as the store can be read."""
    if store is None or not result.waiting:
        return []
    try:
        return await list_waiting(store, result.run_id)
    except PlaitError:  # no store: the result has the questions as well
        return []


def _make_display(dag: DAG, options: OutputOptions, statuses: Mapping[str, TaskStatus] | None) -> Display:
    if options.quiet:
        return NoDisplay()
    # Log lines and a live display would overwrite each other.
    if options.logs or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return PlainDisplay(verbose=options.verbose)
    from plait.runner.cli.live_display import LiveDisplay, Progress  # noqa: PLC0415 - rich takes long to import, and a pipe does not need it

    progress = Progress(dag, time.monotonic, statuses, Limits(total=options.concurrency))
    return LiveDisplay(progress, dag.name or "plait", verbose=options.verbose)


async def _drive(run: Run, dag: DAG, display: Display) -> FinishedRun:
    """Start `run`, which begins with `dag`, and show it to its end. Return its result. Raises as `Run.result`."""
    began, dag = time.monotonic(), dag.copy()
    started: set[str] = set()
    unpriced: set[str | None] = set()
    policy_state: JsonValue = None
    left = _TasksLeft()
    end: events.RunEnded | None = None

    def stop() -> None:
        left.end()
        run.stop()

    try:
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, stop, display.note)
            beside.start_soon(_refresh_display, display)
            async with run:
                async for event in run.events():
                    if isinstance(event, events.TaskStarted) and not isinstance(event, events.TaskAdopted):
                        started.add(event.task_id)
                    elif isinstance(event, events.TasksAdded):
                        grow(dag, event)
                    elif isinstance(event, events.PolicyDecided):
                        policy_state = event.state
                    elif isinstance(event, events.TaskRetried | events.TaskWaiting) and lacks_price(event.usage):
                        unpriced.add(event.usage.model)
                    left.handle(event)
                    if isinstance(event, events.RunEnded):
                        end = event
                    else:
                        display.handle(event)
            beside.cancel_scope.cancel()
        took = time.monotonic() - began
        result = await run.result()
        if end is not None:  # told with the status that is stored, which is known only now
            is_stored = run_report.as_stored(result) is result
            display.handle(end if is_stored else events.RunInterrupted(end.at, end.run_id))
    finally:
        display.close()
    return FinishedRun(
        result, dag, ran=len(started), took=took, policy_state=policy_state, unpriced=unpriced, left=left.by_host()
    )


class _TasksLeft:
    """The tasks that wait for hosts that are away at the moment at which the run is stopped or cancelled."""

    def __init__(self) -> None:
        self._by_host: dict[str, Sequence[str]] = {}
        self._is_ending = False

    def by_host(self) -> Mapping[str, Sequence[str]]:
        """Return the ids of the tasks by host; none if the run ended by itself."""
        return self._by_host if self._is_ending else {}

    def end(self) -> None:
        """Ignore later events: the tasks then end in this process, and wait for no host."""
        self._is_ending = True

    def handle(self, event: events.Event) -> None:
        """Read an event of the run."""
        if isinstance(event, events.RunCancelling):
            self.end()
        elif isinstance(event, events.HostAway) and not self._is_ending:
            self._by_host.pop(event.host, None)
            if event.since is not None:
                self._by_host[event.host] = event.tasks


async def _refresh_display(display: Display) -> None:
    while True:
        await anyio.sleep(_REFRESH)
        display.tick()
