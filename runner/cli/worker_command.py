"""`plait worker`: execute the queued runs of a store, beside other workers. `plait wake`: continue the due."""

from __future__ import annotations

import hashlib
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import click

from plait import events
from plait.errors import PlaitError, StoreError
from plait.runner.cli.command_line import CANCELLED, COMPLETED
from plait.runner.cli.command_options import (
    async_command,
    backends_option,
    hosts_option,
    json_option,
    log_options,
    store_option,
)
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.run_report import PlainDisplay
from plait.runner.cli.terminal_output import as_line, command, print_json, print_line, print_note, visible
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.client.run_worker import Worker
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.engine.run_options import LEASE_SECONDS, StorePlace, open_store
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED
from plait.runner.views.event_sentences import counted, seconds
from plait.statuses import RunStatus


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
    await work(store_path, concurrency, files)


async def work(place: StorePlace, concurrency: int, files: FileOptions, lease: float = LEASE_SECONDS) -> None:
    """Work until a signal."""
    async with open_store(place) as store:
        is_empty = False
        with suppress(StoreError):  # a store that is away is waited for
            is_empty = not await store.list_runs(1)
        print_note(f"working on the runs of {place}, {concurrency} at once; Ctrl-C stops")
        if is_empty:
            print_note(f"{place} has no run yet; if runs were queued elsewhere, name their store with --store")
        worker = Worker(store, concurrency, files, lease, show=_print_event, note=print_note)
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, worker.stop, print_note)
            beside.start_soon(UnsentNotices(store, files).send_for_ever)
            await worker.work()
            beside.cancel_scope.cancel()


@async_command("wake")
@click.option(
    "--install",
    is_flag=True,
    help="Only print a systemd timer with its service, and a line for cron, to copy: each calls `plait wake` every "
    "five minutes.",
)
@store_option
@json_option
@log_options
async def wake_command(store_path: StorePlace, install: bool, as_json: bool, **_options: Any) -> int:
    """Continue the runs that park and are due, until each ends or is parked again; for cron or a timer.

    Runs that were begun with --park, or parked once, go on by themselves: at their time, once a person has answered,
    and after their process has died. A run that a person has stopped stays stopped. Prints which runs go on, and which
    are not due yet, and sends the notices that other processes have left. Ctrl-C or SIGTERM leaves the runs to the next
    call.
    """
    if install:
        print_line(timer_text(store_path))
        return COMPLETED
    woken: dict[str, PlaitError | None] = {}

    def told(run_id: str, error: PlaitError | None) -> None:
        woken[run_id] = error
        print_woken(run_id, error)

    async def is_new(run_id: str) -> bool:
        return run_id not in woken

    failure: PlaitError | None = None
    async with open_store(store_path, "existing") as store:
        runs = TrustedBackends(store, note=print_note).runs()
        waiting = anyio.CancelScope()
        async with anyio.create_task_group() as beside:
            await beside.start(stop_on_signal, waiting.cancel, print_note)
            try:
                async with runs:
                    with waiting:
                        await runs.wake(told)
                        while runs.driven:
                            await runs.one_gone()
                            await runs.wake(told, fits=is_new)
                        await UnsentNotices(store).send()
            except PlaitError as error:
                failure = error
            beside.cancel_scope.cancel()
        if failure is not None:
            raise failure
        with suppress(StoreError):  # what dead processes have left, since no other one may be there
            await UnsentNotices(store).send()
        ended = [await runs.get(run_id, tasks=False) for run_id in woken]
        parked = await runs.list(MOST_RUNS_SEARCHED, statuses=[RunStatus.PARKED])
    if as_json:
        reasons = {run_id: str(error) for run_id, error in woken.items() if error is not None}
        gone_on = [{"run_id": one.run_id, "status": one.status, "error": reasons.get(one.run_id)} for one in ended]
        print_json({"woken": gone_on, "parked": [{"run_id": one.run_id, "due_at": one.due_at} for one in parked]})
    else:
        lines = [f"run {as_line(one.run_id)} is {one.status_text}" for one in ended if woken[one.run_id] is None]
        lines += [f"run {as_line(one.run_id)} is {one.status_text}" for one in parked if one.run_id not in woken]
        for line in lines or ([] if woken else ["no run is due, and none is parked"]):
            print_line(line)
    return CANCELLED if waiting.cancel_called else COMPLETED


def print_woken(run_id: str, error: PlaitError | None) -> None:
    """Say that a parked run goes on, or what keeps it from it."""
    why = None if error is None else as_line(str(error), 300)
    print_note(f"run {as_line(run_id)} goes on" if why is None else f"run {as_line(run_id)} is left parked: {why}")


def timer_text(place: StorePlace) -> str:
    """Return the unit files of a timer that wakes the runs of the store, and a line for cron."""
    program = str(Path(shutil.which(sys.argv[0]) or sys.argv[0]).absolute())
    words = [program, "wake", "--store", str(place.absolute() if isinstance(place, Path) else place)]
    name = f"plait-wake-{hashlib.sha256(words[-1].encode()).hexdigest()[:6]}"
    cron = command(*words).replace("%", r"\%")
    return _TIMER.format(name=name, unit=" ".join(map(_unit_word, words)), cron=cron)


def _unit_word(word: str) -> str:
    """Return the word as a command line of systemd writes it."""
    escaped = visible(word).replace("\\", r"\\").replace('"', r"\"").replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


_TIMER = """\
# ~/.config/systemd/user/{name}.service
[Unit]
Description=Continue the plait runs that are due

[Service]
Type=oneshot
ExecStart={unit}
# The keys of the backends, NAME=VALUE in each line, in a file for your eyes only:
#EnvironmentFile=%h/.config/plait/keys

# ~/.config/systemd/user/{name}.timer
[Unit]
Description=Continue the plait runs that are due, every five minutes

[Timer]
OnCalendar=*:0/5
Persistent=true

[Install]
WantedBy=timers.target

# systemctl --user daemon-reload && systemctl --user enable --now {name}.timer

# Or a line for `crontab -e`, below lines NAME=VALUE with the keys of the backends:
*/5 * * * * {cron}"""


def _print_event(run_id: str, event: events.Event) -> None:
    """Print a line for each event of a run but those of its tasks."""
    if isinstance(event, events.StoreAwaited):
        print_note(
            f"run {as_line(run_id)} has ended; waiting up to {seconds(event.seconds)} for the store to take the "
            f"last {counted(event.changes, 'change')}; a second signal ends the wait"
        )
    elif not isinstance(event, events.TaskEvent | events.TasksAdded):
        PlainDisplay().handle(event)
