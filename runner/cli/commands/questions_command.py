"""`plait questions`: what tasks ask."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option


@click.command("questions", short_help="Show what waits for a person.")
@click.argument("run", required=False)
@store_option
@json_option
def questions_command(run: str | None, store_path: Path, as_json: bool) -> int:
    """Show what the tasks of RUN (an id, its beginning, or `last`) ask, or those of all runs, with the commands that
    answer. A question whose answer is on its way to the run is not shown any more.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.questions import list_questions  # noqa: PLC0415

    return anyio.run(list_questions, run, store_path, as_json)
