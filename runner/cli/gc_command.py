"""`plait gc`: delete old runs from the store."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import anyio
import click

from plait.clock_and_ids import iso
from plait.errors import Conflict, Fenced
from plait.events import RunReleased
from plait.persistence import Batch
from plait.persistence.delete_runs import Purged
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_exits import COMPLETED
from plait.runner.cli.command_options import json_option, store_option
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, print_line, print_note
from plait.runner.client.retention import Expiry, earlier_runs_needed, expired
from plait.runner.client.store_place import AnyStore, StorePlace, existing_store, read_only_store
from plait.runner.engine.lease import Liveness, liveness
from plait.runner.state.attempt_files import delete_files, has_sessions
from plait.runner.views.event_sentences import counted, size
from plait.statuses import RUN_DONE, RunStatus

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_age(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 45m")
    return int(found[1]) * _UNITS[found[2]]


@click.command("gc")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the N newest ended runs.")
@click.option(
    "--older-than",
    callback=_parse_age,
    metavar="AGE",
    help="Delete only runs that ended longer ago than AGE: 30d, 12h or 45m.",
)
@click.option("--dry-run", is_flag=True, help="Only print the runs that would be deleted.")
@store_option
@json_option
def gc_command(keep: int | None, older_than: float | None, dry_run: bool, store_path: StorePlace, as_json: bool) -> int:
    """Delete ended runs (completed, failed or cancelled) for good, with everything stored of each run, and shrink the
    file.

    Give --keep, --older-than, or both; with both, a run is deleted only if both hold. A run that has not ended, that a
    process works on, or that an unfinished run was made from, is never deleted.
    """
    if keep is None and older_than is None:
        raise click.UsageError("choose the runs to delete: --keep N, --older-than AGE, or both")
    return anyio.run(delete_expired, store_path, Expiry(keep, older_than), dry_run, as_json)


_ALL = 1 << 31


@dataclass(frozen=True, slots=True)
class _Outcome:
    runs: Sequence[RunRecord]
    sizes: Mapping[str, int]
    kept: int
    purged: Purged | None = None
    """None for a dry run."""


async def delete_expired(path: StorePlace, expiry: Expiry, dry_run: bool, as_json: bool) -> int:
    """Delete the runs that have expired; with `dry_run`, only print the runs. Return the exit code."""
    async with read_only_store(path) if dry_run else existing_store(path) as store:
        runs = await store.list_runs(_ALL)
        runs = tuple([await _release_dead_owner(store, run, dry_run) for run in runs])
        needed = await earlier_runs_needed(store, runs)
        old = [run for run in expired(runs, expiry, time.time()) if run.run_id not in needed]
        sizes = await store.run_sizes()
        # Also without expired runs: an earlier purge may have left pages to wipe.
        purged = None if dry_run else await store.purge([run.run_id for run in old])
        sessions = None if dry_run or not has_sessions(store.files_root) else await store.session_ids()
    if purged is not None:
        stored = {run.run_id for run in runs}.difference(purged.run_ids)
        files = await delete_files(store.files_root, purged.run_ids, stored, sessions)
        purged = replace(purged, remains="; ".join(filter(None, (purged.remains, files))) or None)
    _print_outcome(_Outcome(old, sizes, len(runs) - len(old), purged), as_json)
    return COMPLETED


async def _release_dead_owner(store: AnyStore, run: RunRecord, dry_run: bool) -> RunRecord:
    """Return an ended run without its owner if the owner died, as after a killed `plait continue`. A dry run changes
    the returned value alone, not the store.
    """
    if RunStatus(run.status) not in RUN_DONE or run.owner is None or liveness(run.owner) is not Liveness.DEAD:
        return run
    if dry_run:
        return replace(run, owner=None)
    try:
        leaving = (RunReleased(iso(time.time())),)
        await store.write(Batch(run.run_id, run.epoch, run.last_seq + 1, leaving, run.owner.owner_id))
    except (Conflict, Fenced):  # another process has just claimed the run
        return run
    return replace(run, owner=None)


def _print_outcome(outcome: _Outcome, as_json: bool) -> None:
    purged = outcome.purged
    if as_json:
        print_json(_as_json(outcome))
    else:
        for run in outcome.runs:
            held = size(outcome.sizes.get(run.run_id, 0))
            print_line(f"{as_line(run.run_id)}  {as_line(run.name, 40)}  {run.status}, {held}")
        done = "would delete" if purged is None else "deleted"
        freed = "" if purged is None else f", {size(purged.freed_bytes)} freed"
        print_line(f"{done} {counted(len(outcome.runs), 'run')}{freed}; {outcome.kept:,} kept")
    if purged is not None and purged.remains is not None:
        print_note(f"plait: {purged.remains}")


def _as_json(outcome: _Outcome) -> dict[str, object]:
    purged = outcome.purged
    return {
        "dry_run": purged is None,
        "runs": [
            {
                "run_id": run.run_id,
                "name": run.name,
                "status": run.status,
                "ended_at": run.ended_at,
                "size_bytes": outcome.sizes.get(run.run_id, 0),
            }
            for run in outcome.runs
        ],
        "kept": outcome.kept,
        "freed_bytes": 0 if purged is None else purged.freed_bytes,
        "remains": None if purged is None else purged.remains,
    }
