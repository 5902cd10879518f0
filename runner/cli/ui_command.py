"""`plait ui`: open the web page on a store."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from plait.errors import InvalidRequest
from plait.runner.cli.command_exits import CANCELLED, COMPLETED
from plait.runner.cli.command_options import apply_log_options, json_option, log_options, store_option
from plait.runner.cli.serve_command import DEFAULT_PORT, missing_packages, serve_until_signal
from plait.runner.cli.terminal_output import print_line, print_note, redirect_prints
from plait.runner.client.store_place import AnyStore, StorePlace, open_store
from plait.runner.client.trusted_backends import TrustedBackends
from plait.runner.serving.server_token import (
    listen,
    make_access,
    page_address,
    page_of_running_server,
    token_file,
    url_of,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

_EVERYWHERE = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - refused
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_PROOF_S = 10.0


@click.command("ui")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Serve on this address. Any other than 127.0.0.1 and ::1 lets other machines in, without encryption.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Serve on this port; 0 takes a free port.  [default: {DEFAULT_PORT}, or a free port if it is taken]",
)
@click.option("--no-browser", is_flag=True, help="Only print the address; open no browser.")
@store_option
@json_option
@log_options
def ui_command(host: str, port: int | None, no_browser: bool, store_path: StorePlace, **options: Any) -> int:
    """Open the web page: runs with their tasks, conversations and costs, live; questions are answered there, and runs
    are resumed and cancelled.

    The address holds a code that can be used once, within a minute; the browser is then signed in until the server
    ends. Ctrl-C stops the runs that the page has resumed, and ends the page; other processes and their runs go on.
    """
    apply_log_options(options["log_style"], options["log_level"])
    if lack := missing_packages("ui"):
        raise InvalidRequest(lack)
    if host in _EVERYWHERE:
        raise InvalidRequest(
            f"--host {host!r} names every address; name the one address under which browsers open the page"
        )
    if host == "localhost":
        host = "127.0.0.1"  # a browser may look for localhost at ::1, where another user's server may listen
    with redirect_prints():
        return anyio.run(_open_page, UiOptions(host, port, store_path, options["as_json"], not no_browser))


@dataclass(frozen=True, slots=True)
class UiOptions:
    """The address of the page, the store of its runs, and how the page is announced."""

    host: str
    port: int | None
    """The port; None for the default, or a free port if the default is taken."""
    store: StorePlace
    as_json: bool
    browser: bool
    """Whether a browser is opened."""


async def _open_page(options: UiOptions) -> int:
    """Open the page of a server that runs on the store already, or serve the page until a signal. Return the exit
    code.
    """
    async with open_store(options.store) as store:
        with ExitStack() as stack:
            try:
                listening = stack.enter_context(listen(options.host, _port(options)))
            except InvalidRequest:
                url = url_of(options.host, _port(options))
                page = None
                with anyio.move_on_after(_PROOF_S):
                    page = await anyio.to_thread.run_sync(
                        page_of_running_server, options.store, url, store.files_root, abandon_on_cancel=True
                    )
                if page is not None:
                    print_note("a server runs on this store already; its page:")
                    await _announce(options, {"url": url, "page": page})
                    return COMPLETED
                if options.port is not None:
                    raise
                listening = stack.enter_context(listen(options.host, 0))
            return await _serve(listening, store, options)


def _port(options: UiOptions) -> int:
    return DEFAULT_PORT if options.port is None else options.port


async def _serve(listening: socket.socket, store: AnyStore, options: UiOptions) -> int:
    """Serve the page until a signal. Return the exit code."""
    from plait.runner.serving.http_routes import ServedRuns  # noqa: PLC0415
    from plait.runner.serving.http_server import ApiServer  # noqa: PLC0415 - the extra `server` may be missing

    async with TrustedBackends(store).runs() as runs:
        served = ServedRuns(runs, (), {}, creates=False)
        url = url_of(options.host, listening.getsockname()[1])
        access = make_access(options.store, url, store.files_root)
        with token_file(access):
            address = page_address(url, access.sign_in)
            server = ApiServer(served, listening, access.token, access.sign_in, options.host)
            if options.host not in _LOOPBACK:
                print_note(
                    f"connections to {options.host} are not encrypted: others in the network can read them, sign-in "
                    "included; a tunnel by ssh is safer"
                )
            print_note("the page, until Ctrl-C:")
            told = {"url": url, "page": address, "token_file": str(access.token_path)}
            await serve_until_signal(server, runs, partial(_announce, options, told))
        return CANCELLED if runs.driven else COMPLETED


async def _announce(options: UiOptions, told: Mapping[str, str]) -> None:
    """Print the address on a line of its own, and for a program that waits; open the browser of the desktop, if there
    is one.
    """
    print_note(told["page"])
    if options.as_json:
        print_line(json.dumps(dict(told)))
    has_desktop = sys.platform in {"darwin", "win32"} or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if options.browser and has_desktop:
        await anyio.to_thread.run_sync(webbrowser.open, told["page"], abandon_on_cancel=True)
