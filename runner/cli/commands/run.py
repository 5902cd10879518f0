"""`plait run`: run a plan file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import click

from plait.persistence import SQLiteStore
from plait.runner import Plan
from plait.runner.cli.backends import Backing, Wish, backing_of_plan, names_needed
from plait.runner.cli.display.follow import see_through
from plait.runner.cli.exits import prints_aside
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    Manner,
    backend_options,
    concurrency_option,
    configure_log,
    json_option,
    log_options,
    quiet_option,
    read_plan,
    set_option,
    store_option,
    verbose_option,
)


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@set_option
@concurrency_option
@backend_options
@store_option
@click.option("--no-store", is_flag=True, help="Write nothing down; the run cannot be resumed.")
@json_option
@quiet_option
@verbose_option
@log_options
def run_command(plan: Path, inputs: dict[str, str], **options: Any) -> int:
    """Run the plan in the file PLAN. The results of its final tasks go to standard output, all else to standard error.

    Ctrl-C stops the run so that `plait resume` can go on with it; once more leaves at once.
    """
    configure_log(options["log_style"], options["log_level"])
    loaded = read_plan(plan, inputs)
    backing = backing_of_plan(loaded, Wish(options["backend"], options["model"], options["base_url"]))
    with prints_aside():
        return anyio.run(run_plan, loaded, backing, Manner.of(options))


async def run_plan(plan: Plan, backing: Backing, manner: Manner) -> int:
    """Run `plan`; the exit code."""
    names = names_needed(plan.dag, backing.default, policy=plan.policy, known=backing.specs)
    store = None if manner.store is None else SQLiteStore(manner.store)
    # The store is opened last: a missing backend must not leave an empty store behind.
    async with backing.running(names) as made, store or nullcontext():
        concurrency = manner.concurrency or plan.concurrency or DEFAULT_CONCURRENCY
        runner = backing.runner(made, store=store, concurrency=concurrency)
        run = runner.start(plan.dag, settings=backing.settings(), policy=plan.policy)
        return await see_through(run, plan.dag, manner, store)
