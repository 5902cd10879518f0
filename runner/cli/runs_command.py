"""`plait runs`: list the runs of a store."""

from __future__ import annotations

import sys
import time

import click

from plait.clock_and_ids import parse_time
from plait.persistence import Store
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import async_command, json_option, store_option
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, cells, print_line, print_note, print_table
from plait.runner.client.create_run import KEYED
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.state.stored_run import read_settings
from plait.runner.views.event_sentences import age, size, spent_cells, tokens
from plait.runner.views.read_views import find_runs, run_view
from plait.runner.views.view_models import RunView, view_json
from plait.statuses import RunStatus, TaskStatus


@async_command("runs")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="List at most this many runs, newest first.",
)
@click.option(
    "--status",
    "statuses",
    type=click.Choice([status.value for status in RunStatus]),
    multiple=True,
    help="List only runs shown with this status; may be given more than once.",
)
@click.option("--long", is_flag=True, help="Also print tokens, size in the store, and owner.")
@store_option
@json_option
async def runs_command(
    limit: int, statuses: tuple[str, ...], long: bool, store_path: StorePlace, as_json: bool
) -> None:
    """List the runs in the store, newest first. A run without a living owner is shown as interrupted."""
    wanted = tuple(map(RunStatus, statuses))
    async with open_store(store_path, "read") as store:
        records = await find_runs(store, min(limit + 1, sys.maxsize), statuses=wanted, searched=sys.maxsize)
        sizes = await store.run_sizes() if long else {}
        runs = records[:limit]
        keys = [] if as_json else [await _key(store, run) for run in runs]
    views = list(map(run_view, runs))
    held = [sizes.get(run.run_id, 0) for run in runs]
    if as_json:
        sized = ({**view_json(one), "size_bytes": size} for one, size in zip(views, held, strict=True))
        print_json(list(sized) if long else views)
        return
    if not runs:
        shown = " or ".join(statuses)
        print_line(f"no run is {shown}; `plait runs` shows all" if shown else "no runs yet; `plait run PLAN` makes one")
        return
    rows = _fitted(list(map(_run_row, runs, views)))
    head = LONG_HEAD if long else HEAD
    if long:
        rows = [
            (*first, tokens(run.usage), size(bytes_held), created, _owner(shown))
            for (*first, created), run, shown, bytes_held in zip(rows, runs, views, held, strict=True)
        ]
    if any(keys):
        head, rows = (*head, "KEY"), [(*row, key) for row, key in zip(rows, keys, strict=True)]
    print_table([head, *rows], 2, [None, *(shown.status for shown in views)], frozenset({4, 5, 6, 7}))
    if len(records) > limit:
        print_note(f"these are the newest {limit}; there are more: --limit N")


HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "AGE")
LONG_HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "TOKENS", "SIZE", "AGE", "OWNER")
_WIDTH = 80
_SHORTEST_NAME = 8


def _fitted(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the columns of the short list, with names cut so that a line has at most 80 columns, if possible."""
    widths = [max(map(cells, column)) for column in zip(HEAD, *rows, strict=True)]
    room = _WIDTH - sum(widths) - 2 * (len(HEAD) - 1) + widths[1]
    return [(run_id, as_line(name, max(room, _SHORTEST_NAME)), *rest) for run_id, name, *rest in rows]


def _owner(run: RunView) -> str:
    if run.owner is None:
        return ""
    return as_line(f"{run.owner.process}{', gone' if run.owner.liveness == 'dead' else ''}")


def _run_row(run: RunRecord, shown: RunView) -> tuple[str, ...]:
    if run.damaged:
        return as_line(run.run_id), "", "damaged", "", "", ""
    completed, failed = (run.counts.get(one, 0) for one in (TaskStatus.COMPLETED, TaskStatus.FAILED))
    return (
        as_line(run.run_id),
        as_line(run.name, 40),
        shown.status_text,
        f"{completed:,} of {shown.total:,}" + (f", {failed:,} failed" if failed else ""),
        spent_cells(run.usage)[1],
        age(time.time() - parse_time(run.created_at)),
    )


async def _key(store: Store, run: RunRecord) -> str:
    """Return the key from which the id of the run was made; empty without one. It is read for such runs alone: with the
    settings come all inputs.
    """
    whole = await store.get_run(run.run_id) if run.run_id.startswith(KEYED) and not run.damaged else None
    key = None if whole is None or whole.damaged else read_settings(whole).get("key")
    return as_line(key, 40) if isinstance(key, str) else ""
