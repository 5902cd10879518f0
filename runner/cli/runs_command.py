"""`plait runs`: list the runs of a store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import anyio
import click

from plait.persistence import Store
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_exits import COMPLETED
from plait.runner.cli.command_options import json_option, store_option
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, cells, print_line, print_note, print_table
from plait.runner.client.create_run import KEYED
from plait.runner.client.store_place import StorePlace, read_only_store
from plait.runner.engine.lease import Liveness, liveness
from plait.runner.views.event_sentences import age, size, tokens
from plait.runner.views.read_views import run_view, shown_status
from plait.runner.views.view_models import view_json
from plait.statuses import RunStatus, TaskStatus
from plait.usage import cost


@click.command("runs")
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
def runs_command(limit: int, statuses: tuple[str, ...], long: bool, store_path: StorePlace, as_json: bool) -> int:
    """List the runs in the store, newest first. A run without a living owner is shown as interrupted."""
    return anyio.run(list_runs, store_path, limit, tuple(map(RunStatus, statuses)), long, as_json)


HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "AGE")
LONG_HEAD = ("RUN", "NAME", "STATUS", "TASKS", "COST", "TOKENS", "SIZE", "AGE", "OWNER")


async def list_runs(
    path: StorePlace, limit: int, statuses: Collection[RunStatus] = (), long: bool = False, as_json: bool = False
) -> int:
    """Print the newest `limit` runs with one of the shown `statuses` (all if there are none), newest first.

    `long` adds tokens, owner and size in the store. Return the exit code.
    """
    async with read_only_store(path) as store:
        found = await _find_runs(store, limit, statuses)
        sizes = await store.run_sizes() if long else {}
        runs = found[:limit]
        keys = [] if as_json else [await _key(store, run) for run in runs]
    held = [sizes.get(run.run_id, 0) for run in runs]
    if as_json:
        print_json(list(map(_long_run_json, runs, held)) if long else list(map(_run_json, runs)))
        return COMPLETED
    if not runs:
        shown = " or ".join(statuses)
        print_line(f"no run is {shown}; `plait runs` shows all" if shown else "no runs yet; `plait run PLAN` makes one")
        return COMPLETED
    rows = _fitted(list(map(_run_row, runs)))
    if long:
        rows = list(map(_long_row, rows, runs, held))
    head = LONG_HEAD if long else HEAD
    if any(keys):
        head, rows = (*head, "KEY"), [(*row, key) for row, key in zip(rows, keys, strict=True)]
    print_table([head, *rows], 2, [None, *(shown_status(run) for run in runs)], frozenset({4, 5, 6, 7}))
    _print_if_more(runs, found)
    return COMPLETED


async def _find_runs(store: Store, limit: int, statuses: Collection[RunStatus]) -> list[RunRecord]:
    """Return the chosen runs, and one more if there is one. The shown status is not a column of the store, so that
    larger and larger pages are read until enough runs match.
    """
    many = min(limit + 1, sys.maxsize)
    while True:
        runs = await store.list_runs(many)
        found = [run for run in runs if not statuses or shown_status(run) in statuses]
        if len(found) > limit or len(runs) < many:
            return found[: limit + 1]
        many *= 4


def _print_if_more(runs: Sequence[RunRecord], found: Sequence[RunRecord]) -> None:
    if len(found) > len(runs):
        print_note(f"these are the newest {len(runs)}; there are more: --limit N")


def _long_row(row: tuple[str, ...], run: RunRecord, held: int) -> tuple[str, ...]:
    *row_start, created = row
    used = tokens(run.usage.input_tokens, run.usage.output_tokens)
    return (*row_start, used, size(held), created, _owner(run))


_WIDTH = 80
_SHORTEST_NAME = 8


def _fitted(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the columns of the short list, with names cut so that a line has at most 80 columns, if possible."""
    widths = [max(map(cells, column)) for column in zip(HEAD, *rows, strict=True)]
    room = _WIDTH - sum(widths) - 2 * (len(HEAD) - 1) + widths[1]
    return [(run_id, as_line(name, max(room, _SHORTEST_NAME)), *rest) for run_id, name, *rest in rows]


def _long_run_json(run: RunRecord, held: int) -> dict[str, Any]:
    owner = None if run.owner is None else {**asdict(run.owner), "liveness": liveness(run.owner).value}
    return {**_run_json(run), "size_bytes": held, "owner": owner}


def _owner(run: RunRecord) -> str:
    if run.owner is None:
        return ""
    gone = ", gone" if liveness(run.owner) is Liveness.DEAD else ""
    return as_line(f"process {run.owner.pid} on {run.owner.host}{gone}")


def _run_row(run: RunRecord) -> tuple[str, ...]:
    if run.damaged:
        return as_line(run.run_id), "", "damaged", "", "", ""
    shown = run_view(run)
    created = datetime.fromisoformat(run.created_at).timestamp()
    return (
        as_line(run.run_id),
        as_line(run.name, 40),
        shown.status_text,
        _progress(run),
        "unknown" if run.usage.cost_is_unknown else cost(run.usage),
        age(time.time() - created),
    )


async def _key(store: Store, run: RunRecord) -> str:
    """Return the key from which the id of the run was made; empty without one. It is read for such runs alone: with the
    settings come all inputs.
    """
    whole = await store.get_run(run.run_id) if run.run_id.startswith(KEYED) and not run.damaged else None
    key = None if whole is None or whole.damaged else json.loads(whole.settings).get("key")
    return as_line(key, 40) if isinstance(key, str) else ""


def _progress(run: RunRecord) -> str:
    """Return the completed tasks and the failures: `28 of 30, 2 failed`."""
    completed, failed = run.counts.get(TaskStatus.COMPLETED, 0), run.counts.get(TaskStatus.FAILED, 0)
    return f"{completed:,} of {sum(run.counts.values()):,}" + (f", {failed:,} failed" if failed else "")


def _run_json(run: RunRecord) -> dict[str, Any]:
    return view_json(run_view(run))
