"""`plait try`: run one task of a stored run anew, beside the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import click

from plait.runner.cli.exits import redirect_prints
from plait.runner.cli.forks import ForkOptions, read_text, run_fork
from plait.runner.cli.like import again_option, dry_run_option
from plait.runner.cli.options import (
    KINDS,
    OutputOptions,
    apply_log_options,
    backends_option,
    json_option,
    log_options,
    plan_option,
    quiet_option,
    store_option,
    verbose_option,
)
from plait.runner.cli.stored_backends import FileOptions
from plait.runner.operations.fork_run import Fork
from plait.runner.parallel import ParallelRunner


@click.command("try")
@click.argument("run")
@click.argument("task")
@click.option("--prompt-file", metavar="FILE", type=click.Path(path_type=Path), help="Use the prompt in FILE.")
@click.option("--backend", metavar="NAME", help=f"Use this backend of RUN, or {KINDS}.")
@again_option
@dry_run_option
@plan_option
@backends_option
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def try_command(run: str, task: str, prompt_file: Path | None, **options: Any) -> int:
    """Run TASK of RUN (an id, the beginning of an id, or `last`) alone, on the inputs recorded in RUN, and print the
    result. RUN does not change; the attempt is kept as a run of its own.
    """
    apply_log_options(options["log_style"], options["log_level"])
    prompt = None if prompt_file is None else read_text(prompt_file)
    backend = options["backend"]
    files = FileOptions(options["plan"], options["backends"])
    request = ForkOptions(run, files, options["again"], options["dry_run"], backend)

    async def make(runner: ParallelRunner, run_id: str) -> Fork:
        return await runner.try_task(run_id, task, prompt=prompt, backend=backend)

    with redirect_prints():
        return anyio.run(run_fork, request, make, replace(OutputOptions.of(options), result_of=task))
