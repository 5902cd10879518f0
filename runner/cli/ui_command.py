"""`plait ui`: open the web page on a store."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from plait.backends.extras import missing_extra
from plait.errors import InvalidRequest
from plait.runner.cli.command_line import CANCELLED, COMPLETED
from plait.runner.cli.command_options import async_command, json_option, log_options, store_option
from plait.runner.cli.serve_command import DEFAULT_PORT, SERVER, serve_until_signal
from plait.runner.cli.terminal_output import print_line, print_note
from plait.runner.cli.worker_command import print_woken
from plait.runner.client.run_backends import TrustedBackends
from plait.runner.engine.run_options import AnyStore, StorePlace, open_store
from plait.runner.serving.http_guard import (
    listen,
    page_address,
    page_of_running_server,
    server_access,
    url_of,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Mapping

    _Announce = Callable[[Mapping[str, str]], Coroutine[Any, Any, None]]

_EVERYWHERE = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104 - refused
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_PROOF_S = 10.0


@async_command("ui")
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
async def ui_command(host: str, port: int | None, no_browser: bool, store_path: StorePlace, **options: Any) -> int:
    """Open the web page: runs with their tasks, conversations and costs, live; questions are answered there, and runs
    are resumed and cancelled.

    The address holds a code that can be used once, within a minute; the browser is then signed in until the server
    ends. Ctrl-C stops the runs that the page has resumed, and ends the page; other processes and their runs go on.
    """
    if lack := missing_extra("plait ui", *SERVER):
        raise InvalidRequest(lack)
    if host in _EVERYWHERE:
        raise InvalidRequest(
            f"--host {host!r} names every address; name the one address under which browsers open the page"
        )
    if host == "localhost":
        host = "127.0.0.1"  # a browser may look for localhost at ::1, where another user's server may listen
    announce = partial(_announce, options["as_json"], not no_browser)
    async with open_store(store_path) as store:
        with ExitStack() as stack:
            wanted = DEFAULT_PORT if port is None else port
            try:
                listening = stack.enter_context(listen(host, wanted))
            except InvalidRequest:
                url = url_of(host, wanted)
                page = None
                with anyio.move_on_after(_PROOF_S):
                    page = await anyio.to_thread.run_sync(
                        page_of_running_server, store_path, url, store.files_root, abandon_on_cancel=True
                    )
                if page is not None:
                    print_note("a server runs on this store already; its page:")
                    await announce({"url": url, "page": page})
                    return COMPLETED
                if port is not None:
                    raise
                listening = stack.enter_context(listen(host, 0))
            return await _serve(listening, store, host, store_path, announce)


async def _serve(listening: socket.socket, store: AnyStore, host: str, place: StorePlace, announce: _Announce) -> int:
    """Serve the page until a signal. Return the exit code."""
    from plait.runner.serving.http_routes import ServedRuns  # noqa: PLC0415
    from plait.runner.serving.http_server import ApiServer  # noqa: PLC0415 - the extra `server` may be missing

    async with TrustedBackends(store).runs() as runs:
        served = ServedRuns(runs, (), {}, creates=False)
        url = url_of(host, listening.getsockname()[1])
        with server_access(place, url, store.files_root) as access:
            address = page_address(url, access.sign_in)
            server = ApiServer(served, listening, access.token, access.sign_in, host)
            if host not in _LOOPBACK:
                print_note(
                    f"connections to {host} are not encrypted: others in the network can read them, sign-in "
                    "included; a tunnel by ssh is safer"
                )
            print_note("the page, until Ctrl-C:")
            facts = {"url": url, "page": address, "token_file": str(access.token_path)}
            wakes = partial(runs.keep_waking, print_woken)
            await serve_until_signal(server, runs, partial(announce, facts), wakes)
        return CANCELLED if runs.driven else COMPLETED


async def _announce(as_json: bool, opens_browser: bool, facts: Mapping[str, str]) -> None:
    """Print the address on a line of its own, and for a program that waits; open the browser of the desktop, if there
    is one.
    """
    print_note(facts["page"])
    if as_json:
        print_line(json.dumps(dict(facts)))
    has_desktop = sys.platform in {"darwin", "win32"} or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if opens_browser and has_desktop:
        await anyio.to_thread.run_sync(webbrowser.open, facts["page"], abandon_on_cancel=True)
