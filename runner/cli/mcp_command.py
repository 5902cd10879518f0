"""`plait mcp`: runs for an agent that speaks the Model Context Protocol."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import anyio
import click

from plait.backends.extras import missing_extra
from plait.clock_and_ids import Clock
from plait.errors import InvalidRequest
from plait.runner.cli.command_line import CANCELLED
from plait.runner.cli.command_options import (
    async_command,
    backend_options,
    log_options,
    store_option,
)
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.terminal_output import output, print_note
from plait.runner.client.offered_plans import LocalPlans, named_plans
from plait.runner.client.run_backends import BackendOptions, TrustedBackends
from plait.runner.engine.run_options import open_store


@async_command("mcp")
@click.argument("plans", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PLAN...")
@backend_options
@store_option
@log_options
async def mcp_command(plans: tuple[Path, ...], **options: Any) -> None:
    """Serve the Model Context Protocol on standard input and output: an agent may start runs of the plans in the files
    PLAN, each under the name of its file, wait for a run, read results, answer questions and cancel.

    The runs stop when the agent closes the connection. A start with the same key, or `plait resume`, continues a run.
    """
    if lack := missing_extra("plait mcp", "mcp", "mcp"):
        raise InvalidRequest(lack)
    named_plans(plans)
    backend = BackendOptions(options["backend"], options["model"], options["base_url"])
    from plait.runner.serving.mcp_server import RunTools, serve  # noqa: PLC0415 - the extra `mcp` may be missing

    ended, signalled = anyio.Event(), anyio.Event()

    def end_at_signal() -> None:
        signalled.set()
        ended.set()

    async def serve_until_closed(tools: RunTools) -> None:
        with redirect_stdout(output()):  # the server reads the names of the streams, and redirects `print` itself
            await serve(tools)
        ended.set()

    async with open_store(options["store_path"]) as store, anyio.create_task_group() as beside:
        async with TrustedBackends(store).runs() as runs:
            await beside.start(stop_on_signal, end_at_signal, print_note)
            tools = RunTools(runs, LocalPlans(plans, backend, store, runs), Clock())
            beside.start_soon(serve_until_closed, tools)
            await ended.wait()
        if signalled.is_set():
            # A thread still waits for a line of standard input, and nothing ends that wait. The runs are stored.
            os._exit(CANCELLED)
        beside.cancel_scope.cancel()
