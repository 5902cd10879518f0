"""`plait continue`: send one more message in the conversation of a task."""

from __future__ import annotations

import signal
from typing import Any

import click

from plait.runner.cli.command_options import (
    async_command,
    backends_option,
    complete,
    hosts_option,
    json_option,
    log_options,
    plan_option,
    run_argument,
    store_option,
)
from plait.runner.cli.ctrl_c import end_at_second
from plait.runner.cli.run_report import print_watch_notice
from plait.runner.cli.terminal_output import output, print_json, print_line, print_note, visible, without_controls
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.engine.run_options import open_store
from plait.runner.views.read_views import find_task
from plait.runner.views.view_models import ReplyView
from plait.safe_text import is_utf8


@async_command("continue")
@run_argument
@click.argument("task", shell_complete=complete)
@click.argument("message")
@plan_option
@backends_option
@hosts_option
@store_option
@json_option
@log_options
async def continue_command(run: str, task: str, message: str, **options: Any) -> None:
    """Send MESSAGE in the conversation of TASK in RUN (an id, the beginning of an id, or `last`) and print the answer.

    The turn is stored; the result of the task does not change.
    """
    if not is_utf8(message):
        raise click.BadParameter("the message is not text in UTF-8")
    if not message.strip():
        raise click.BadParameter("the message is empty")
    end_at_second([signal.SIGINT])  # the first cancels this function
    async with open_store(options["store_path"], "existing") as store:
        record = await find_run(store, run)
        await find_task(store, record, task)
        print_watch_notice(record)
        files = FileOptions(options["plan"], options["backends"], options["hosts"])
        runs = TrustedBackends(store, files, note=print_note).runs()
        reply = await runs.continue_task(record.run_id, task, message)
    if options["as_json"]:
        print_json(ReplyView.of(record.run_id, task, reply))
        return
    fit = visible if output().isatty() else without_controls
    print_line(fit(reply.text).removesuffix("\n"))
