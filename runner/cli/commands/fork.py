"""`plait fork`: run a stored run anew from one of its tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import click

from plait.json_form import JsonValue
from plait.runner.cli.exits import CliError, redirect_prints
from plait.runner.cli.forks import ForkOptions, parse_files, run_fork
from plait.runner.cli.like import again_option, dry_run_option
from plait.runner.cli.options import (
    OutputOptions,
    apply_log_options,
    backends_option,
    concurrency_option,
    json_option,
    log_options,
    plan_option,
    quiet_option,
    set_option,
    store_option,
    verbose_option,
)
from plait.runner.cli.stored_backends import FileOptions
from plait.runner.operations.fork_run import Fork, ForkEdits
from plait.runner.parallel import ParallelRunner
from plait.runner.plan.inputs import converted
from plait.runner.state.stored_run import stored_record


@click.command("fork")
@click.argument("run")
@click.option("--from", "start", metavar="TASK", required=True, help="Run on from TASK, with everything behind TASK.")
@click.option(
    "--prompt",
    "prompts",
    metavar="TASK=FILE",
    multiple=True,
    callback=parse_files,
    help="Give TASK the prompt in FILE; may be given more than once.",
)
@set_option
@click.option(
    "--result",
    "results",
    metavar="TASK=FILE",
    multiple=True,
    callback=parse_files,
    help="Give TASK the result in FILE, without a call; may be given more than once.",
)
@again_option
@dry_run_option
@plan_option
@backends_option
@concurrency_option("as stored with the run")
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def fork_command(run: str, start: str, **options: Any) -> int:
    """Start a new run from TASK of RUN (an id, the beginning of an id, or `last`), which may have ended, failed or been
    interrupted. RUN does not change.

    TASK runs. Tasks behind TASK or behind an edit, and tasks that did not complete, run unless nothing changed for
    them. All other tasks keep their results and conversations.
    """
    apply_log_options(options["log_style"], options["log_level"])
    files = FileOptions(options["plan"], options["backends"])
    request = ForkOptions(run, files, options["again"], options["dry_run"])
    prompts, results, given = options["prompts"], options["results"], options["inputs"]

    async def make(runner: ParallelRunner, run_id: str) -> Fork:
        edits = ForkEdits(prompts, await _inputs(runner, run_id, given), results)
        return await runner.fork(run_id, start, edits)

    with redirect_prints():
        return anyio.run(run_fork, request, make, OutputOptions.of(options))


async def _inputs(runner: ParallelRunner, run_id: str, given: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the values of inputs, each like the stored value. Raises CliError."""
    if not given:
        return {}
    _, record = await stored_record(runner.config.store, run_id)
    stored = json.loads(record.settings).get("inputs", {})
    values: dict[str, JsonValue] = {}
    for name, text in given.items():
        try:
            values[name] = converted(text, stored.get(name))
        except ValueError as error:
            raise CliError(f"--set {name}: {error}") from None
    return values
