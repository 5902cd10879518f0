"""`plait continue`: one more turn in a task's conversation."""

from __future__ import annotations

from typing import Any

import anyio
import click

from plait.runner.cli.display import report
from plait.runner.cli.display.text import visible, without_controls
from plait.runner.cli.exits import COMPLETED, output, prints_aside, tell
from plait.runner.cli.lookup import (
    find_run,
    find_task,
    say_if_watched,
    store_for_going_on,
)
from plait.runner.cli.options import (
    Manner,
    backends_option,
    configure_log,
    is_text,
    json_option,
    log_options,
    plan_option,
    store_option,
)
from plait.runner.cli.stored_backends import Files, Kept
from plait.runner.operations.inspect import usage_value
from plait.runner.state.codec import dag_of


@click.command("continue")
@click.argument("run")
@click.argument("task")
@click.argument("message")
@plan_option
@backends_option
@store_option
@json_option
@log_options
def continue_command(run: str, task: str, message: str, **options: Any) -> int:
    """Say MESSAGE in the conversation of TASK in RUN (an id, its beginning, or `last`) and print the answer.

    The turn is stored; the task's result stays as it is.
    """
    if not is_text(message):
        raise click.BadParameter("the message is not text in UTF-8")
    if not message.strip():
        raise click.BadParameter("the message is empty")
    configure_log(options["log_style"], options["log_level"])
    with prints_aside():
        return anyio.run(
            continue_task, run, task, message, Files(options["plan"], options["backends"]), Manner.of(options)
        )


async def continue_task(word: str, task_id: str, message: str, files: Files, manner: Manner) -> int:
    """Say `message` in a task's conversation; the exit code."""
    assert manner.store is not None
    async with store_for_going_on(manner.store) as store:
        record = await find_run(store, word)
        await find_task(store, record, task_id)
        say_if_watched(record)
        dag = dag_of(record, await store.list_tasks(record.run_id))
        kept = Kept.of(record, files)
        names = [dag.backend_of(dag[task_id]) or kept.default]
        backing = kept.backing(names)
        async with backing.running(names) as made:
            reply = await backing.runner(made, store=store).continue_task(record.run_id, task_id, message)
    if manner.as_json:
        value: dict[str, Any] = {
            "run_id": record.run_id,
            "task_id": task_id,
            "text": reply.text,
            "session_id": reply.session_id,
            **usage_value(reply.usage),
        }
        report.tell_value(value)
    else:
        fit = visible if output().isatty() else without_controls
        tell(fit(reply.text).removesuffix("\n"))
    return COMPLETED
