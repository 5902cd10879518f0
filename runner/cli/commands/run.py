"""`plait run`: run a plan file."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import click

from plait.runner import Plan
from plait.runner.cli.backends import BackendOptions, BackendSet, backend_set_of_plan, required_backends
from plait.runner.cli.display.follow import follow_run
from plait.runner.cli.exits import CliError, redirect_prints
from plait.runner.cli.lookup import find_run, open_store
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    OutputOptions,
    apply_log_options,
    backend_options,
    concurrency_option,
    json_option,
    log_options,
    quiet_option,
    read_plan,
    set_option,
    store_option,
    verbose_option,
)
from plait.runner.policies.orchestrator.policy import OrchestratorPolicy
from plait.runner.policies.orchestrator.prompts import ANSWER_ID


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@set_option
@concurrency_option("as the plan says")
@backend_options
@store_option
@click.option(
    "--like",
    metavar="RUN",
    help="Take the answers of unchanged tasks from RUN (an id, the beginning of an id, or `last`), without a call.",
)
@click.option("--no-store", is_flag=True, help="Store nothing; the run cannot be resumed.")
@json_option
@quiet_option
@verbose_option
@log_options
def run_command(plan: Path, inputs: dict[str, str], **options: Any) -> int:
    """Run the plan in the file PLAN. The results of the final tasks are printed on standard output, everything else on
    standard error.

    Ctrl-C stops the run, and `plait resume` continues the run later; a second Ctrl-C exits at once.
    """
    apply_log_options(options["log_style"], options["log_level"])
    loaded = read_plan(plan, inputs)
    backend_set = backend_set_of_plan(loaded, BackendOptions(options["backend"], options["model"], options["base_url"]))
    if options["like"] is not None and options["no_store"]:
        raise CliError("--like takes answers from the store; leave --no-store out")
    with redirect_prints():
        return anyio.run(run_plan, loaded, backend_set, OutputOptions.of(options), options["like"])


async def run_plan(plan: Plan, backend_set: BackendSet, options: OutputOptions, like: str | None = None) -> int:
    """Run `plan`, with the answers of the run `like` where nothing changed. Return the exit code."""
    plan = plan.fitted_to(backend_set.specs, backend_set.default)
    if isinstance(plan.policy, OrchestratorPolicy):
        options = replace(options, result_of=ANSWER_ID)
    names = required_backends(plan.dag, backend_set.default, policy=plan.policy, known=backend_set.specs)
    store = None
    if options.store is not None:
        store = open_store(options.store, "create" if like is None else "existing")
    # The store is opened last, so that a missing backend leaves no empty store behind.
    async with backend_set.open(names) as made, store or nullcontext():
        concurrency = options.concurrency or plan.concurrency or DEFAULT_CONCURRENCY
        runner = backend_set.make_runner(made, store=store, concurrency=concurrency)
        earlier = None if like is None or store is None else (await find_run(store, like)).run_id
        run = runner.start(plan.dag, settings=backend_set.settings(), policy=plan.policy, like=earlier)
        return await follow_run(run, plan.dag, options, store)
