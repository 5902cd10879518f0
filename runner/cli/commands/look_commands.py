"""`plait runs` and `plait show`: their options."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import json_option, store_option
from plait.runner.domain.status import RunStatus


@click.command("runs", short_help="List the runs.")
@click.option("-n", "--limit", type=click.IntRange(1), default=20, show_default=True, help="How many, newest first.")
@click.option(
    "--status",
    "statuses",
    type=click.Choice([status.value for status in RunStatus]),
    multiple=True,
    help="Only those that are shown so; may be given more than once.",
)
@click.option("--long", "at_length", is_flag=True, help="Show their cost, size and owner as well.")
@store_option
@json_option
def runs_command(limit: int, statuses: tuple[str, ...], at_length: bool, store_path: Path, as_json: bool) -> int:
    """List the runs in the store, newest first. A run that nobody goes on with is shown as interrupted."""
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.runs import Wanted, list_runs  # noqa: PLC0415

    return anyio.run(list_runs, store_path, Wanted(limit, tuple(map(RunStatus, statuses)), at_length), as_json)


@click.command("show", short_help="Show a run or one of its tasks.")
@click.argument("run")
@click.argument("task", required=False)
@click.option("--events", is_flag=True, help="Show the run's history instead of its tasks.")
@store_option
@json_option
def show_command(run: str, task: str | None, events: bool, store_path: Path, as_json: bool) -> int:
    """Show RUN with its tasks, or TASK of it with its prompt, conversation, result and attempts."""
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.show import show_events, show_run, show_task  # noqa: PLC0415

    if task is not None and events:
        raise click.UsageError("--events is for a whole run; leave TASK out")
    if task is not None:
        return anyio.run(show_task, store_path, run, task, as_json)
    return anyio.run(show_events if events else show_run, store_path, run, as_json)
