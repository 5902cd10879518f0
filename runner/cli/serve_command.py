"""`plait serve`: runs for the programs on this machine, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from plait.backends.backend_protocol import Backend
from plait.backends.command_backend import CommandBackend
from plait.backends.extras import missing_extra
from plait.errors import InvalidRequest, PlaitError
from plait.persistence.store_protocol import Store
from plait.runner.cli.command_line import CANCELLED, COMPLETED
from plait.runner.cli.command_options import (
    Amount,
    async_command,
    backend_options,
    concurrency_option,
    json_option,
    log_options,
    store_option,
)
from plait.runner.cli.ctrl_c import stop_on_signal
from plait.runner.cli.terminal_output import as_line, print_line, print_note
from plait.runner.cli.worker_command import print_woken
from plait.runner.client.run_backends import (
    BackendOptions,
    BackendSet,
    TrustedBackends,
    backend_set_of_file,
    queueing_options,
)
from plait.runner.client.runs import Runs
from plait.runner.client.unsent_notices import UnsentNotices
from plait.runner.engine.run_options import CANCEL_GRACE_SECONDS, open_store
from plait.runner.serving.http_guard import listen, server_access, url_of
from plait.runner.state.stored_run import POSTED

if TYPE_CHECKING:
    from plait.runner.serving.http_server import ApiServer


DEFAULT_PORT = 8377
SERVER = ("server", "fastapi", "uvicorn")
"""The extra of a server, and its packages."""


@async_command("serve")
@click.option(
    "--backends",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Run plans on the `backends` (and `defaults.backend`) of this plan file.",
)
@backend_options
@click.option(
    "--host",
    type=click.Choice(["127.0.0.1", "::1"]),
    default="127.0.0.1",
    show_default=True,
    help="Listen on this address of the loopback.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Listen on this port; 0 takes a free port.",
)
@click.option(
    "--cancel-grace",
    metavar="SECONDS",
    type=Amount(0, 86_400, "a number of seconds"),
    default=CANCEL_GRACE_SECONDS,
    show_default=True,
    help="Let running tasks of a cancelled run go on for this long; 0 ends them at once.",
)
@click.option(
    "--resume",
    "takes_up",
    is_flag=True,
    help="Also take up the posted runs that were queued or interrupted, or that wait for a person, at the start.",
)
@click.option(
    "--queue",
    "queues",
    is_flag=True,
    help="Store posted runs as queued, for the workers of the store (plait worker), and execute none here.",
)
@concurrency_option()
@store_option
@json_option
@log_options
async def serve_command(file: Path | None, **options: Any) -> int:
    """Create, start, follow, answer and cancel runs over HTTP. Only programs on this machine that send the token are
    served; the token is in a file beside the store, and the path is printed.

    Ctrl-C stops the runs, and `plait resume` continues each later; a second Ctrl-C exits at once.
    """
    if options["queues"] and options["takes_up"]:
        raise click.UsageError("give --queue or --resume, not both: with --queue, the workers take up the runs")
    backend_set = _prepare(file, BackendOptions(options["backend"], options["model"], options["base_url"]))
    return await _serve(backend_set, options)


async def _serve(backend_set: BackendSet, options: Mapping[str, Any]) -> int:
    """Serve until a signal. Return the exit code."""
    from plait.runner.serving.http_routes import ServedRuns  # noqa: PLC0415
    from plait.runner.serving.http_server import ApiServer  # noqa: PLC0415 - the extra `server` may be missing

    with listen(options["host"], options["port"]) as listening:
        opened = () if options["queues"] else backend_set.specs
        async with (
            backend_set.open(opened) as made,
            open_store(options["store_path"]) as store,
            _make_runs(backend_set, made, store, options) as runs,
        ):
            for backend in made.values():
                if isinstance(backend, CommandBackend):
                    backend.only_allowed = True
            settings = {**backend_set.settings(), POSTED: True}
            specs = backend_set.specs
            served = ServedRuns(runs, tuple(specs), settings, specs, backend_set.default, starts=not options["queues"])
            url = url_of(options["host"], listening.getsockname()[1])
            with server_access(options["store_path"], url, store.files_root) as access:
                if options["as_json"]:
                    # One line, for the program that waits.
                    print_line(json.dumps({"url": url, "token_file": str(access.token_path)}))
                doing = "queueing runs for workers" if options["queues"] else "serving runs"
                print_note(f"{doing} on {url}; `plait ui` opens the web page; Ctrl-C stops")
                print_note(f"  {'token':<9} {access.token_path}")
                server = ApiServer(served, listening, access.token, access.sign_in, options["host"])
                take_up = partial(runs.take_up, _print_taken_up) if options["takes_up"] else None
                wakes = None if options["queues"] else partial(runs.keep_waking, print_woken, fits=runs.is_posted)
                await serve_until_signal(server, runs, take_up, wakes)
            return CANCELLED if runs.driven else COMPLETED


def _make_runs(backend_set: BackendSet, made: Mapping[str, Backend], store: Store, options: Mapping[str, Any]) -> Runs:
    """Return the runs: on the open backends `made`, or on none if the workers execute the runs."""
    concurrency = options["concurrency"] or backend_set.concurrency()
    if options["queues"]:
        queueing = queueing_options(backend_set, backend_set.specs, store, concurrency)
        return Runs(queueing, source=TrustedBackends(store))
    return Runs(
        backend_set.options(
            made, store=store, concurrency=concurrency, shared_limits=True, cancel_grace=options["cancel_grace"]
        )
    )


async def serve_until_signal(
    server: ApiServer, runs: Runs, *at_start: Callable[[], Coroutine[Any, Any, None]] | None
) -> None:
    """Serve until the first signal. `at_start` are called once signals are handled."""

    def note(text: str) -> None:
        print_note(text if runs.driven else "stopping")

    async with anyio.create_task_group() as beside:
        await beside.start(stop_on_signal, server.stop, note)
        for start in filter(None, at_start):
            beside.start_soon(start)
        if runs.options.store is not None:
            beside.start_soon(UnsentNotices(runs.options.store).send_for_ever)
        await server.serve()
        beside.cancel_scope.cancel()


def _print_taken_up(run_id: str, error: PlaitError | None) -> None:
    if error is None:
        print_note(f"took up run {as_line(run_id)}")
    else:
        print_note(f"run {as_line(run_id)} is left as it is: {as_line(str(error), 300)}")


def _prepare(file: Path | None, options: BackendOptions) -> BackendSet:
    """Return the backends of the runs. Raises InvalidRequest if packages are missing, with the problem of the backends
    if there is one too.
    """
    lack = missing_extra("plait serve", *SERVER)
    try:
        backend_set = backend_set_of_file(file, options)
    except PlaitError as error:
        if lack:
            raise InvalidRequest(f"{lack}\n{error}") from None
        raise
    if lack:
        raise InvalidRequest(lack)
    return backend_set
