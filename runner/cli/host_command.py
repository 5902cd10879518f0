"""`plait host`: the host process, which `plait run` starts over ssh on each host of a plan."""

from __future__ import annotations

import os
import signal
import stat
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import anyio

from plait.errors import InvalidRequest
from plait.runner.cli.command_line import COMPLETED, subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.backends.backend_protocol import Backend
    from plait.json_form import JsonValue


@subcommand("host")
def host_command() -> int:
    """Serve the attempts that a run places on this host. Started over ssh by `plait run`; not for typing.

    Reads frames from standard input and writes frames to standard output, one JSON object a line. Exits with its
    connection; agents under way go on.
    """
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):  # the event loop cannot wait for the end of anything else
        raise InvalidRequest(
            "plait host is started over ssh by a run whose plan names hosts; its standard input has to be a pipe or a "
            "socket, and is neither"
        )
    from plait.backends.hosts.host_process import serve, state_folder  # noqa: PLC0415 - the help needs neither

    # A signal has to end this process at once: an orderly end would end the agents.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    anyio.run(serve, _build, state_folder(), version("plait"))
    return COMPLETED


def _build(described: Mapping[str, JsonValue]) -> Backend:
    """Return the backend described. Raises BackendUnavailable if this host cannot make the backend."""
    if "spec" in described:
        # The models of plan files take as long to import as everything else here.
        from plait.backends.backend_specs import build_spec  # noqa: PLC0415

        return build_spec(described)
    from plait.backends.hosts.host_backend import build_described  # noqa: PLC0415

    return build_described(described)
