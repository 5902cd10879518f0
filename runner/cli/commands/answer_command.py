"""`plait answer`: a person answers a task's question, or settles a task that waits for them."""

from __future__ import annotations

from pathlib import Path

import click

from plait.runner.cli.options import is_text, json_option, store_option


@click.command("answer", short_help="Answer a task's question, or settle one that waits.")
@click.argument("run")
@click.argument("task")
@click.argument("value", required=False)
@click.option("--done", metavar="TEXT", help="It is done; TEXT is its result (JSON if it has an output_schema).")
@click.option("--again", is_flag=True, help="It did not take effect; run it again. For at_most_once alone.")
@click.option("--fail", metavar="REASON", help="It failed, and REASON says why.")
@store_option
@json_option
def answer_command(  # noqa: PLR0913, PLR0917 - click hands over each option
    run: str,
    task: str,
    value: str | None,
    done: str | None,
    again: bool,
    fail: str | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Answer what TASK in RUN (an id, its beginning, or `last`) asks with VALUE: text, or JSON where the question wants
    some. `plait questions` shows what is asked. The first answer counts, also while another process runs the run.

    A task marked at_most_once waits when its process ended while it was under way: say --done, --again or --fail. The
    first and the last also end a task that asks. `plait resume` goes on afterwards.
    """
    import anyio  # noqa: PLC0415

    from plait.runner.cli.commands.answer import How, Word, answer_task  # noqa: PLC0415

    said: dict[How, str | None] = {"value": value, "done": done, "again": "" if again else None, "fail": fail}
    given = [Word(how, text) for how, text in said.items() if text is not None]
    if len(given) != 1:
        raise click.UsageError("say one of VALUE, --done TEXT, --again and --fail REASON")
    if not is_text(given[0].text):
        raise click.BadParameter("the answer is not text in UTF-8")
    return anyio.run(answer_task, (run, task), given[0], store_path, as_json)
