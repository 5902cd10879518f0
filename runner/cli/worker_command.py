"""`plait worker`: execute the queued runs of a store, beside other workers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import click

from plait import events
from plait.errors import StoreError
from plait.runner.cli.command_options import (
    async_command,
    backends_option,
    hosts_option,
    log_options,
    store_option,
)
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.follow_run import PlainDisplay
from plait.runner.cli.run_report import store_failures
from plait.runner.cli.terminal_output import as_line, print_note
from plait.runner.client.run_backends import FileOptions
from plait.runner.client.run_worker import Worker, WorkerOptions
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.views.event_sentences import counted, seconds


@async_command("worker")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Execute at most this many runs at once, each with as many tasks at once as stored with the run.",
)
@click.option(
    "--plans",
    metavar="FOLDER",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take functions, commands and permissions also from the plan files in this folder. Others are used only if "
    "nobody but this user and root may change them. May be repeated.",
)
@backends_option
@hosts_option
@store_option
@log_options
async def worker_command(store_path: StorePlace, concurrency: int, **options: Any) -> None:
    """Execute queued runs, and runs whose process has died, until a signal. Several workers may share a store.

    Ctrl-C or SIGTERM stops the runs and frees them for other workers; a second signal exits at once.
    """
    plans = tuple(folder.resolve() for folder in options["plans"])
    files = FileOptions(backends=options["backends"], hosts=options["hosts"], plans=plans)
    await work(store_path, WorkerOptions(concurrency, files))


async def work(place: StorePlace, options: WorkerOptions) -> None:
    """Work until a signal."""
    async with open_store(place) as store:
        is_empty = False
        with suppress(StoreError):  # a store that is away is waited for
            is_empty = not await store.list_runs(1)
        print_note(f"working on the runs of {place}, {options.concurrency} at once; Ctrl-C stops")
        if is_empty:
            print_note(f"{place} has no run yet; if runs were queued elsewhere, name their store with --store")
        worker = Worker(store, options, _WorkerLines())
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, worker.stop, print_note)
            beside.start_soon(UnsentNotices(store, options.files).send_for_ever)
            await worker.work()
            beside.cancel_scope.cancel()


class _WorkerLines:
    """One line for each event of a run but those of its tasks."""

    def __init__(self) -> None:
        self._plain = PlainDisplay()

    def handle(self, run_id: str, event: events.Event) -> None:
        if isinstance(event, events.StoreAwaited):
            print_note(
                f"run {as_line(run_id)} has ended; waiting up to {seconds(event.seconds)} for the store to take the "
                f"last {counted(event.changes, 'change')}; a second signal ends the wait"
            )
        elif not isinstance(event, events.TaskEvent | events.TasksAdded):
            self._plain.handle(event)

    def note(self, text: str) -> None:
        print_note(text)

    def end(self, result: RunResult) -> None:
        for line in store_failures(result):
            print_note(line)
