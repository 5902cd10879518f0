"""`plait pause`, `plait tune` and `plait retry`: steer a run that goes on, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping

import click

from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import (
    async_command,
    complete,
    json_option,
    parse_assignments,
    print_next,
    run_argument,
    store_option,
)
from plait.runner.cli.terminal_output import print_json, print_note
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.domain.run_tuning import MOST_SLOTS
from plait.runner.engine.run_options import StorePlace, open_store


def _slots_by_name(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    given = parse_assignments(context, parameter, values)
    if wrong := next((one for one in given.items() if not (one[1].isdecimal() and one[1].isascii())), None):
        raise click.BadParameter(f"{wrong[1]!r} is no number of tasks at once for {wrong[0]}")
    return {name: int(number[:9]) for name, number in given.items()}


@async_command("pause")
@run_argument
@click.option("--backend", metavar="NAME", help="Pause this backend of the plan alone.")
@click.option("--off", is_flag=True, help="Let the run, or the backend, go on.")
@store_option
@json_option
async def pause_command(run: str, backend: str | None, off: bool, store_path: StorePlace, as_json: bool) -> None:
    """Pause RUN (an id, the beginning of an id, or `last`), also while another process runs it.

    No further task starts, and calls under way end normally. The process of the run stays, and reads this within a
    second. The run is still paused after a crash and after `plait resume`, until `plait pause RUN --off`.

    `plait tune` changes how many tasks run at once.
    """
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        runs = TrustedBackends(store, FileOptions(), note=print_note).runs()
        is_live = await runs.pause(record.run_id, backend=backend, off=off)
    what = f"{'' if backend is None else f'{backend} of '}run {record.run_id}"
    _print_change(record, f"{what} {'goes on' if off else 'is paused'}", is_live=is_live, as_json=as_json)
    if not as_json and not off:
        print_next(store_path, "pause", record.run_id, *(() if backend is None else ("--backend", backend)), "--off")


@async_command("tune")
@run_argument
@click.option("-j", "--concurrency", type=click.IntRange(1, MOST_SLOTS), help="Run at most this many tasks at once.")
@click.option(
    "--backend",
    "limits",
    multiple=True,
    metavar="NAME=N",
    callback=_slots_by_name,
    help="Run at most N tasks at once on this backend; may be given more than once.",
)
@store_option
@json_option
async def tune_command(
    run: str, concurrency: int | None, limits: Mapping[str, int], store_path: StorePlace, as_json: bool
) -> None:
    """Change how many tasks of RUN (an id, the beginning of an id, or `last`) run at once, while it goes on.

    Calls under way end normally. The process of the run reads the numbers within a second, and a later `plait resume`
    keeps them. A run of `plait serve` gets no more slots than the server has.
    """
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        runs = TrustedBackends(store, FileOptions(), note=print_note).runs()
        is_live = await runs.tune(record.run_id, concurrency=concurrency, limits=limits)
    numbers = [*([] if concurrency is None else [f"{concurrency} tasks at once"])]
    numbers += [f"{number} on {name}" for name, number in limits.items()]
    _print_change(record, f"run {record.run_id} has at most {', '.join(numbers)}", is_live=is_live, as_json=as_json)


@async_command("retry")
@run_argument
@click.argument("task", shell_complete=complete)
@store_option
@json_option
async def retry_command(run: str, task: str, store_path: StorePlace, as_json: bool) -> None:
    """Run the failed TASK of RUN (an id, the beginning of an id, or `last`) again while the run goes on; at once, if it
    waits for its next attempt.

    The process of the run reads this within a second, and tasks that wait for TASK go on after it. Of a run that has
    ended, `plait resume RUN --retry-failed` runs the failed tasks again.
    """
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        await TrustedBackends(store, FileOptions(), note=print_note).runs().retry(record.run_id, task)
    _print_change(record, f"task {task} of run {record.run_id} is to run again", is_live=True, as_json=as_json)


def _print_change(record: RunRecord, said: str, *, is_live: bool, as_json: bool) -> None:
    if as_json:
        print_json({"run_id": record.run_id, "is_live": is_live})
        return
    owner = record.owner.process if record.owner else "its process"
    print_note(said + (f": {owner} reads it within a second" if is_live else "; no process works on it now"))
