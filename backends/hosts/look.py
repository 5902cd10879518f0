"""The state of hosts, asked over lines of their own: nothing is begun, followed or ended, and no fence is taken."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import BinaryIO

import anyio

from plait.backends.hosts.frames import frame_line, read_frame
from plait.backends.hosts.ssh import SSHHost, SSHHosts
from plait.backends.text import one_line
from plait.backends.values import value

_ANSWER_S = 30.0
"""Seconds for a host to answer."""


@value
class HostState:
    """The state of a host."""

    name: str
    slots: int
    at_work: int | None = None
    """The attempts under way on the host, of all runs; None if the host does not answer."""
    version: str | None = None
    """The version of plait there; None if the host does not answer."""
    problem: str | None = None
    """Why the host cannot be used; None if it can."""

    @property
    def is_usable(self) -> bool:
        """Whether attempts can be placed on the host."""
        return self.problem is None

    def as_json(self) -> dict[str, str | int | None]:
        """Return the fields."""
        return asdict(self)


async def look_at_hosts(hosts: SSHHosts) -> list[HostState]:
    """Return the state of each host, in the order given. All are asked at once."""
    found: dict[str, HostState] = {}

    async def look(host: SSHHost) -> None:
        found[host.name] = await _look(host, hosts.command(host, "host"))

    async with anyio.create_task_group() as group:
        for host in hosts.all:
            group.start_soon(look, host)
    return [found[host.name] for host in hosts.all]


async def _look(host: SSHHost, command: tuple[str, ...]) -> HostState:
    question = frame_line({"op": "look", "slots": host.slots})
    try:
        with _filled_pipe(question) as given, anyio.fail_after(_ANSWER_S):
            answer = await anyio.run_process(command, stdin=given, check=False, start_new_session=True)
    except TimeoutError:
        return HostState(host.name, host.slots, problem=f"away: no answer within {_ANSWER_S:g} s")
    except OSError as error:
        return HostState(host.name, host.slots, problem=f"away: cannot start {command[0]}: {error.strerror}")
    try:
        frame = read_frame(answer.stdout.partition(b"\n")[0])
        theirs, at_work = str(frame["version"]), int(frame["at_work"])
    except (KeyError, TypeError, ValueError):
        last = answer.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        why = one_line(last) or f"{command[0]} exited with {answer.returncode}"
        return HostState(host.name, host.slots, problem=f"away: {why}")
    ours = version("plait")
    differs = f"plait {theirs} is installed there, and {ours} here; install the same version"
    problem = None if theirs == ours else differs
    return HostState(host.name, host.slots, at_work, theirs, problem)


@contextmanager
def _filled_pipe(line: bytes) -> Generator[BinaryIO]:
    """Yield a pipe that holds `line` and ends. A command that ends without reading, as ssh does without a connection,
    would break a pipe that is written while the command runs.
    """
    given, written = os.pipe()
    with os.fdopen(given, "rb") as end:
        with os.fdopen(written, "wb") as start:
            start.write(line)
        yield end
