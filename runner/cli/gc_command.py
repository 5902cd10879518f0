"""`plait gc`: delete old runs from the store."""

from __future__ import annotations

import re

import click

from plait.runner.cli.command_options import async_command, json_option, store_option
from plait.runner.cli.terminal_output import as_line, print_json, print_line, print_note
from plait.runner.client.runs import Runs
from plait.runner.engine.run_options import RunOptions, StorePlace, open_store
from plait.runner.views.event_sentences import counted, size

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_age(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 45m")
    return int(found[1]) * _UNITS[found[2]]


@async_command("gc")
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
async def gc_command(
    keep: int | None, older_than: float | None, dry_run: bool, store_path: StorePlace, as_json: bool
) -> None:
    """Delete ended runs (completed, failed or cancelled) for good, with everything stored of each run, and shrink the
    file.

    Give --keep, --older-than, or both; with both, a run is deleted only if both hold. A run that has not ended, that a
    process works on, or that an unfinished run was made from, is never deleted.
    """
    if keep is None and older_than is None:
        raise click.UsageError("choose the runs to delete: --keep N, --older-than AGE, or both")
    async with open_store(store_path, "read") if dry_run else open_store(store_path, "existing") as store:
        runs = Runs(RunOptions(store=store))
        deletion = await runs.delete(keep=keep, older_than=older_than, dry_run=dry_run)
    if as_json:
        fields = ("run_id", "name", "status", "ended_at")
        each = [
            {**{name: getattr(run, name) for name in fields}, "size_bytes": deletion.sizes.get(run.run_id, 0)}
            for run in deletion.runs
        ]
        counts = {"kept": deletion.kept, "freed_bytes": deletion.freed_bytes, "remains": deletion.remains}
        print_json({"dry_run": dry_run, "runs": each, **counts})
    else:
        for run in deletion.runs:
            held = size(deletion.sizes.get(run.run_id, 0))
            print_line(f"{as_line(run.run_id)}  {as_line(run.name, 40)}  {run.status}, {held}")
        done = "would delete" if dry_run else "deleted"
        freed = "" if dry_run else f", {size(deletion.freed_bytes)} freed"
        print_line(f"{done} {counted(len(deletion.runs), 'run')}{freed}; {deletion.kept:,} kept")
    if deletion.remains is not None:
        print_note(f"plait: {deletion.remains}")
