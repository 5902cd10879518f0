"""`plait answer`: a person settles a task that waits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from runner.cli.options import is_text, json_option, store_option


@click.command("answer", short_help="Settle a task that waits for a person.")
@click.argument("run")
@click.argument("task")
@click.option("--done", metavar="TEXT", help="It took effect; TEXT is its result (JSON if it has an output_schema).")
@click.option("--again", is_flag=True, help="It did not take effect; run it again.")
@click.option("--fail", metavar="REASON", help="It failed, and REASON says why.")
@store_option
@json_option
def answer_command(  # noqa: PLR0913, PLR0917 - click hands over each option
    run: str, task: str, done: str | None, again: bool, fail: str | None, store_path: Path, as_json: bool
) -> int:
    """Say what became of TASK in RUN (an id, its beginning, or `last`), which waits for a person.

    A task marked at_most_once waits when its process ended while it was under way. `plait resume` goes on afterwards.
    """
    import anyio  # noqa: PLC0415

    from runner.cli.answering import answer_task  # noqa: PLC0415

    given: list[tuple[Literal["done", "again", "fail"], str]] = []
    if done is not None:
        given.append(("done", done))
    if again:
        given.append(("again", ""))
    if fail is not None:
        given.append(("fail", fail))
    if len(given) != 1:
        raise click.UsageError("say one of --done TEXT, --again and --fail REASON")
    if not is_text(given[0][1]):
        raise click.BadParameter("the answer is not text in UTF-8")
    return anyio.run(answer_task, (run, task), given[0], store_path, as_json)
