"""`plait serve`: its options."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from plait.persistence import SQLiteStore
from plait.runner.cli.backends import Backing, Wish, backing_of_file
from plait.runner.cli.display.follow import stop_when_told
from plait.runner.cli.exits import CANCELLED, COMPLETED, Fault, prints_aside, say, tell
from plait.runner.cli.options import (
    DEFAULT_CONCURRENCY,
    backend_options,
    concurrency_option,
    configure_log,
    json_option,
    log_options,
    store_option,
)
from plait.runner.cli.output_files import write_file
from plait.runner.service import RunService

if TYPE_CHECKING:
    from plait.runner.web.app import Server


DEFAULT_PORT = 8377


@click.command("serve")
@click.option(
    "--backends",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A plan file whose `backends` (and `defaults.backend`) are what plans run on.",
)
@backend_options
@click.option(
    "--host",
    type=click.Choice(["127.0.0.1", "::1"]),
    default="127.0.0.1",
    show_default=True,
    help="Where to listen: this machine alone.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Where to listen; 0 takes any that is free.",
)
@concurrency_option
@store_option
@json_option
@log_options
def serve_command(file: Path | None, **options: Any) -> int:
    """Make, start, follow, answer and cancel runs over HTTP. Only programs on this machine that know the token are
    answered; it is in a file beside the store, whose path is printed.

    Ctrl-C stops the runs so that they can be resumed; once more leaves at once.
    """
    configure_log(options["log_style"], options["log_level"])
    backing = backing_of_file(file, Wish(options["backend"], options["model"], options["base_url"]))
    where = Listening(options["host"], options["port"], options["store_path"], options["as_json"])
    with prints_aside():
        return anyio.run(serve, backing, where, options["concurrency"])


_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens, and where its runs are stored."""

    host: str
    port: int
    store: Path
    as_json: bool


async def serve(backing: Backing, where: Listening, concurrency: int | None) -> int:
    """Serve until told to stop; the exit code."""
    _require_extra()
    from plait.runner.web.app import Server  # noqa: PLC0415 - a server's libraries are no part of the core
    from plait.runner.web.routes import Served  # noqa: PLC0415

    with _socket(where) as listening:
        async with backing.running(backing.specs) as made, SQLiteStore(where.store) as store:
            concurrency = concurrency or DEFAULT_CONCURRENCY
            runner = backing.runner(made, store=store, concurrency=concurrency, shared_limits=True)
            async with RunService(runner) as service:
                token = secrets.token_urlsafe(_TOKEN_BYTES)
                served = Served(service, tuple(backing.specs), {**backing.settings(), "posted": True})
                with _token_file(where, listening, token):
                    await _answer(Server(served, listening, token))
                return CANCELLED if service.driven else COMPLETED


async def _answer(server: Server) -> None:
    async with anyio.create_task_group() as beside:
        await beside.start(stop_when_told, server.stop, say)
        await server.serve()
        beside.cancel_scope.cancel()


def _require_extra() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise Fault(f"plait serve needs the extra `server` ({' and '.join(missing)}): pip install 'plait[server]'")


@contextmanager
def _socket(where: Listening) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        listening = socket.create_server((where.host, where.port), family=family)
    except OSError as error:
        # Python's own text (`strerror`) says the address once more.
        why = os.strerror(error.errno) if error.errno else error
        raise Fault(
            f"cannot listen on {where.host}, port {where.port}: {why}; "
            "choose another one with --port, or 0 for any that is free"
        ) from None
    with listening:
        yield listening


@contextmanager
def _token_file(where: Listening, listening: socket.socket, token: str) -> Generator[None]:
    """The token in a file that only this user can read, for as long as it counts."""
    port = listening.getsockname()[1]
    url = f"http://{f'[{where.host}]' if ':' in where.host else where.host}:{port}"
    path = where.store.absolute().parent / f"serve-{port}.token"
    write_file(path, token + "\n", private=True)
    try:
        if where.as_json:
            tell(json.dumps({"url": url, "token_file": str(path)}))  # one line, for who waits for it
        say(f"serving runs on {url}; Ctrl-C stops")
        say(f"  {'token':<9} {path}")
        yield
    finally:
        path.unlink(missing_ok=True)
