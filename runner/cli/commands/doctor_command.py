"""`plait doctor`: its options."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option


@click.command("doctor", short_help="Say whether this machine, its agents and the store are fit.")
@store_option
@json_option
def doctor_command(store_path: Path, as_json: bool) -> int:
    """Say whether this machine, this SQLite and the store are fit, and what to do where they are not.

    Looks at the versions, at coding agents (which it starts for their version; whether they are logged in is seen
    without reading any secret), the file system, the permissions, every page and checksum of the store, at runs whose
    process is gone and at children that were left behind. Changes nothing. Exit code 3 when something is bad;
    warnings alone leave it at 0.
    """
    from plait.runner.cli.commands.doctor import examine  # noqa: PLC0415

    return examine(store_path, as_json)
