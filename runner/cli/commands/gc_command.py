"""`plait gc`: its options."""

from __future__ import annotations

import re
from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 45m")
    return int(found[1]) * _UNITS[found[2]]


@click.command("gc", short_help="Delete old runs from the store.")
@click.option("--keep", type=click.IntRange(0), metavar="N", help="Keep the N newest ended runs.")
@click.option(
    "--older-than", callback=_seconds, metavar="AGE", help="Only runs that ended so long ago: 30d, 12h or 45m."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@store_option
@json_option
def gc_command(keep: int | None, older_than: float | None, dry_run: bool, store_path: Path, as_json: bool) -> int:
    """Delete ended runs (completed, failed or cancelled) for good, with everything stored of them, and shrink the file.

    With both --keep and --older-than a run goes when both hold; one of them is needed. A run that has not ended is
    never deleted, nor one that a process works on.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.gc import delete_expired  # noqa: PLC0415
    from plait.runner.operations.retention import Expiry  # noqa: PLC0415

    if keep is None and older_than is None:
        raise click.UsageError("say which runs may go: --keep N, --older-than AGE, or both")
    return anyio.run(delete_expired, store_path, Expiry(keep, older_than), dry_run, as_json)
