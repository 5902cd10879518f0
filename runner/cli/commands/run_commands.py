"""`plait run`, `plait resume` and `plait continue`: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from plait.runner.cli.exits import prints_aside
from plait.runner.cli.options import (
    backend_options,
    concurrency_option,
    configure_log,
    is_text,
    json_option,
    log_options,
    quiet_option,
    set_option,
    store_option,
    verbose_option,
)

_PATH = click.Path(path_type=Path)
_plan_option = click.option("--plan", type=_PATH, help="The plan file, if it is not where it was: for its functions.")


_backends_option = click.option(
    "--backends",
    type=_PATH,
    help="A plan file whose `backends` are used in place of the run's, by their names; for a run that a Python program "
    "made, it has to name them all.",
)


@click.command("run", short_help="Run a plan.")
@click.argument("plan", type=_PATH)
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
    import anyio  # noqa: PLC0415

    from plait.runner.cli.backends import Wish, backing_of_plan  # noqa: PLC0415
    from plait.runner.cli.commands.run import run_plan  # noqa: PLC0415
    from plait.runner.cli.plans import read_plan  # noqa: PLC0415

    configure_log(options["log_style"], options["log_level"])
    loaded = read_plan(plan, inputs)
    backing = backing_of_plan(loaded, Wish(options["backend"], options["model"], options["base_url"]))
    with prints_aside():
        return anyio.run(run_plan, loaded, backing, _manner(options))


@click.command("resume", short_help="Go on with a run.")
@click.argument("run", required=False)
@click.option("--retry-failed", is_flag=True, help="Run failed tasks again, and those whose stored result is damaged.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done with each task, and why.")
@_plan_option
@_backends_option
@concurrency_option
@store_option
@json_option
@quiet_option
@verbose_option
@log_options
def resume_command(run: str | None, retry_failed: bool, **options: Any) -> int:
    """Go on with RUN: a run's id, its beginning, or `last`. Without it, the newest run that can be resumed.

    What is completed is kept; what was under way or never began is run. A conversation that was cut goes on where its
    backend is known to have it.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.run import Resumption, resume_run  # noqa: PLC0415
    from plait.runner.cli.stored_backends import Files  # noqa: PLC0415

    configure_log(options["log_style"], options["log_level"])
    wanted = Resumption(run, retry_failed, Files(options["plan"], options["backends"]), options["dry_run"])
    with prints_aside():
        return anyio.run(resume_run, wanted, _manner(options))


@click.command("continue", short_help="Go on with a task's conversation.")
@click.argument("run")
@click.argument("task")
@click.argument("message")
@_plan_option
@_backends_option
@store_option
@json_option
@log_options
def continue_command(run: str, task: str, message: str, **options: Any) -> int:
    """Say MESSAGE in the conversation of TASK in RUN (an id, its beginning, or `last`) and print the answer.

    The turn is stored; the task's result stays as it is.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.run import continue_task  # noqa: PLC0415
    from plait.runner.cli.stored_backends import Files  # noqa: PLC0415

    if not is_text(message):
        raise click.BadParameter("the message is not text in UTF-8")
    if not message.strip():
        raise click.BadParameter("the message is empty")
    configure_log(options["log_style"], options["log_level"])
    with prints_aside():
        return anyio.run(
            continue_task, run, task, message, Files(options["plan"], options["backends"]), _manner(options)
        )


def _manner(options: dict[str, Any]) -> Any:
    from plait.runner.cli.commands.run import Manner  # noqa: PLC0415

    return Manner(
        store=None if options.get("no_store") else options["store_path"],
        quiet=options.get("quiet", False),
        verbose=options.get("verbose", False),
        as_json=options["as_json"],
        logs=options["log_style"] is not None,
        concurrency=options.get("concurrency"),
    )
