"""`plait orchestrate`: its options."""

from __future__ import annotations

from typing import Any

import click

from plait.runner.cli.exits import prints_aside
from plait.runner.cli.options import (
    KINDS,
    concurrency_option,
    configure_log,
    is_text,
    json_option,
    log_options,
    quiet_option,
    store_option,
    verbose_option,
)


@click.command("orchestrate", short_help="Reach a goal by tasks that are planned on the way.")
@click.argument("goal")
@click.option("--planner", metavar="KIND[:MODEL]", help="What plans, and writes the answer in the end.")
@click.option("--executor", metavar="KIND[:MODEL]", help="What does the tasks.")
@click.option("--reflector", metavar="KIND[:MODEL]", help="What judges how far the goal is reached.")
@click.option("--backend", metavar="KIND", help=f"{KINDS}, for those of the three not named.")
@click.option("--model", metavar="NAME", help="Their model; for local, the path of a GGUF file.")
@click.option("--base-url", metavar="URL", help="An OpenAI-compatible server.")
@click.option(
    "--max-iterations",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="After how many executed tasks no other one is begun; those under way come to their end.",
)
@click.option("--max-tasks", type=click.IntRange(1), default=100, show_default=True, help="How many may be planned.")
@click.option(
    "--reflect-every", type=click.IntRange(1), default=3, show_default=True, help="After how many tasks to reflect."
)
@concurrency_option
@store_option
@click.option("--no-store", is_flag=True, help="Write nothing down; the run cannot be resumed.")
@json_option
@quiet_option
@verbose_option
@log_options
def orchestrate_command(goal: str, **options: Any) -> int:
    """Reach GOAL: plan tasks for it, do them, reflect on what came of them, and so on; then make one answer of it all.

    The answer goes to standard output, all else to standard error. It ends as completed, with an answer, also where it
    was stopped by a limit; which one, it says. Ctrl-C stops the run so that `plait resume` can go on with it.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.backends import Wish  # noqa: PLC0415
    from plait.runner.cli.commands.orchestrating import Team, orchestrate  # noqa: PLC0415
    from plait.runner.cli.commands.run import Manner  # noqa: PLC0415

    if not is_text(goal):
        raise click.BadParameter("the goal is not text in UTF-8")
    if not goal.strip():
        raise click.BadParameter("the goal is empty")
    configure_log(options["log_style"], options["log_level"])
    manner = Manner(
        store=None if options["no_store"] else options["store_path"],
        quiet=options["quiet"],
        verbose=options["verbose"],
        as_json=options["as_json"],
        logs=options["log_style"] is not None,
        concurrency=options["concurrency"],
    )
    wish = Wish(options["backend"], options["model"], options["base_url"])
    team = Team(wish, options["planner"], options["executor"], options["reflector"])
    limits = {name: options[name] for name in ("max_iterations", "max_tasks", "reflect_every")}
    with prints_aside():
        return anyio.run(orchestrate, goal, team, limits, manner)
