"""`plait log`: its options."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option


@click.command("log", short_help="Print what a run did, or does.")
@click.argument("run")
@click.argument("task", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over, or TASK.")
@store_option
@json_option
def log_command(run: str, task: str | None, follow: bool, store_path: Path, as_json: bool) -> int:
    """Print what RUN (an id, its beginning, or `last`) did, or TASK of it: what happened when, what it cost, and in
    between what agents did and wrote, and what others said.

    With --follow the exit code is that of the run. An agent whose plait was killed is followed as well; once nobody is
    at work any more, the command ends with code 6. With --json each line is an object.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.log import tell_log  # noqa: PLC0415

    return anyio.run(tell_log, (run, task), store_path, follow, as_json)
