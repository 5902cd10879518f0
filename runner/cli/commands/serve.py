"""`plait serve`: serve runs over HTTP to programs on this machine."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from plait.backends.errors import BackendUnavailable
from plait.backends.extras import install_command
from plait.persistence.errors import StoreError
from plait.persistence.protocol import Store
from plait.runner.cli.backends import BackendOptions, BackendSet, backend_set_of_file
from plait.runner.cli.display.follow import stop_on_signal
from plait.runner.cli.display.text import one_line
from plait.runner.cli.exits import CANCELLED, COMPLETED, CliError, print_line, print_note, redirect_prints
from plait.runner.cli.lookup import MAX_RUNS_SEARCHED, open_store, shown_status
from plait.runner.cli.options import (
    StorePlace,
    apply_log_options,
    backend_options,
    concurrency_option,
    json_option,
    log_options,
    store_option,
)
from plait.runner.cli.output_files import write_file
from plait.runner.domain.status import RunStatus
from plait.runner.errors import PlaitError, RunOwned
from plait.runner.parallel import CANCEL_GRACE_SECONDS
from plait.runner.service import RunService

if TYPE_CHECKING:
    from plait.runner.web.app import ApiServer


DEFAULT_PORT = 8377


@click.command("serve")
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
    type=click.IntRange(0, 86_400),
    default=int(CANCEL_GRACE_SECONDS),
    show_default=True,
    help="Let running tasks of a cancelled run go on for this long; 0 ends them at once.",
)
@click.option(
    "--resume",
    "takes_up",
    is_flag=True,
    help="Also take up the posted runs that were queued or interrupted, or that wait for a person, at the start.",
)
@concurrency_option()
@store_option
@json_option
@log_options
def serve_command(file: Path | None, **options: Any) -> int:
    """Create, start, follow, answer and cancel runs over HTTP. Only programs on this machine that send the token are
    served; the token is in a file beside the store, and the path is printed.

    Ctrl-C stops the runs, and `plait resume` continues each later; a second Ctrl-C exits at once.
    """
    apply_log_options(options["log_style"], options["log_level"])
    backend_set = _prepare(file, BackendOptions(options["backend"], options["model"], options["base_url"]))
    where = ServeOptions(
        options["host"],
        options["port"],
        options["store_path"],
        options["as_json"],
        options["cancel_grace"],
        options["takes_up"],
    )
    with redirect_prints():
        return anyio.run(serve, backend_set, where, options["concurrency"])


_TOKEN_BYTES = 32
_TO_TAKE_UP = frozenset({RunStatus.QUEUED, RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT})


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The address of the server, the store of its runs, and the grace time of a cancelled run in seconds."""

    host: str
    port: int
    store: StorePlace
    as_json: bool
    cancel_grace: int
    takes_up: bool = False
    """Continue posted runs of earlier servers."""


async def serve(backend_set: BackendSet, options: ServeOptions, concurrency: int | None) -> int:
    """Serve until a signal. Return the exit code."""
    from plait.runner.web.app import ApiServer  # noqa: PLC0415 - the extra `server` may be missing
    from plait.runner.web.routes import ServedRuns  # noqa: PLC0415

    with _listen(options) as listening:
        async with backend_set.open(backend_set.specs) as made, open_store(options.store) as store:
            concurrency = concurrency or backend_set.concurrency()
            runner = backend_set.make_runner(
                made, store=store, concurrency=concurrency, shared_limits=True, cancel_grace=options.cancel_grace
            )
            async with RunService(runner) as service:
                token = secrets.token_urlsafe(_TOKEN_BYTES)
                settings = {**backend_set.settings(), "posted": True}
                specs = backend_set.specs
                served = ServedRuns(service, tuple(specs), settings, specs, backend_set.default)
                with _token_file(options, listening, token, store.files_root):
                    await _serve_until_signal(
                        ApiServer(served, listening, token), partial(_take_up, service, store, options.takes_up)
                    )
                return CANCELLED if service.driven else COMPLETED


async def _serve_until_signal(server: ApiServer, at_start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as beside:
        await beside.start(stop_on_signal, server.stop, print_note)
        beside.start_soon(at_start)
        await server.serve()
        beside.cancel_scope.cancel()


async def _take_up(service: RunService, store: Store, wanted: bool) -> None:
    """Continue the posted runs that no process executes, if `wanted`. Other runs have backends of their own."""
    runs = await store.list_runs(MAX_RUNS_SEARCHED) if wanted else ()
    async with anyio.create_task_group() as group:
        for run in runs:
            if not run.damaged and shown_status(run) in _TO_TAKE_UP:
                group.start_soon(_take_up_run, service, store, run.run_id)


async def _take_up_run(service: RunService, store: Store, run_id: str) -> None:
    try:
        record = await store.get_run(run_id)
        if record is not None and json.loads(record.settings).get("posted"):
            await service.start_run(run_id)
            print_note(f"took up run {one_line(run_id)}")
    except RunOwned:
        pass  # another server was faster
    except (PlaitError, StoreError) as error:
        print_note(f"run {one_line(run_id)} is left as it is: {one_line(str(error), 300)}")


def _prepare(file: Path | None, options: BackendOptions) -> BackendSet:
    """Return the backends of the runs. Raises CliError if packages are missing, with the problem of the backends if
    there is one too.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    lack = f"plait serve needs the extra `server` ({' and '.join(missing)}); run: {install_command('server')}"
    try:
        backend_set = backend_set_of_file(file, options)
    except (BackendUnavailable, CliError, PlaitError) as error:
        if missing:
            raise CliError(f"{lack}\n{error}") from None
        raise
    if missing:
        raise CliError(lack)
    return backend_set


@contextmanager
def _listen(options: ServeOptions) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listening = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        # The text of Python (`strerror`) would repeat the address.
        why = os.strerror(error.errno) if error.errno else error
        raise CliError(
            f"cannot listen on {options.host}, port {options.port}: {why}; "
            "choose another one with --port, or 0 for any that is free"
        ) from None
    with listening:
        yield listening


@contextmanager
def _token_file(
    options: ServeOptions, listening: socket.socket, token: str, files_root: Path | None
) -> Generator[None]:
    """Keep the token in a file that only this user can read, while the server runs."""
    port = listening.getsockname()[1]
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    # Beside a file; for a server in the folder of the store on this host.
    folder = options.store.absolute().parent if isinstance(options.store, Path) else files_root
    assert folder is not None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"serve-{port}.token"
    write_file(path, token + "\n", private=True)
    try:
        if options.as_json:
            print_line(json.dumps({"url": url, "token_file": str(path)}))  # one line, for the program that waits
        print_note(f"serving runs on {url}; Ctrl-C stops")
        print_note(f"  {'token':<9} {path}")
        yield
    finally:
        path.unlink(missing_ok=True)
