"""Hosts outside of any run, for `plait doctor --hosts`: their state, and commands of plait there.

Each has a connection of its own: no attempt begins or ends, and no fence is taken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version

import anyio

from plait.backends.hosts.host_connection import Channel, HostUnreachable
from plait.backends.hosts.host_frames import foreign_output, frame_line, read_frame
from plait.json_form import value
from plait.safe_text import one_line


@value
class CommandResult:
    """The end of a command."""

    code: int | None
    """The exit code; None if the connection broke."""
    output: bytes
    """All of standard output."""
    errors: str
    """The last line of standard error."""


@value
class ReachableHost:
    """A host."""

    name: str
    slots: int
    """The number of attempts at once."""
    open: Callable[[Sequence[str]], Awaitable[Channel]]
    """Starts `plait` with these words there. Raises HostUnreachable."""

    async def run(self, words: Sequence[str], data: bytes = b"") -> CommandResult:
        """Run `plait` with `words` there, with `data` as standard input. Raises HostUnreachable."""
        channel = await self.open(words)
        output = bytearray()
        try:
            if data:
                await channel.send(data)
            await channel.end_input()
            with suppress(anyio.EndOfStream):
                while True:
                    output += await channel.receive()
        finally:
            await channel.close()
        return CommandResult(channel.code, bytes(output), channel.errors)


NO_WORKER = "no worker that offers resources"
"""The problem of a cluster that has no host."""
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


async def probe_hosts(hosts: Sequence[ReachableHost]) -> list[HostState]:
    """Return the state of each host, in the order given. All are asked at once."""
    states: dict[int, HostState] = {}

    async def probe(index: int, host: ReachableHost) -> None:
        states[index] = await _probe(host)

    async with anyio.create_task_group() as group:
        for index, host in enumerate(hosts):
            group.start_soon(probe, index, host)
    return [states[index] for index in range(len(hosts))]


async def _probe(host: ReachableHost) -> HostState:
    question = frame_line({"op": "probe"})
    try:
        with anyio.fail_after(_ANSWER_S):
            answer = await host.run(("host",), question)
    except TimeoutError:
        return HostState(host.name, host.slots, problem=f"away: no answer within {_ANSWER_S:g} s")
    except HostUnreachable as error:
        return HostState(host.name, host.slots, problem=f"away: {error}")
    first = answer.output.partition(b"\n")[0]
    try:
        frame = read_frame(first)
        if frame["op"] == "refused":
            return HostState(host.name, host.slots, problem=one_line(str(frame["message"])))
        theirs, at_work = str(frame["version"]), int(frame["at_work"])
    except (KeyError, TypeError, ValueError):
        why = foreign_output(first) if first else answer.errors or f"plait host exited with {answer.code}"
        return HostState(host.name, host.slots, problem=f"away: {why}")
    ours = version("plait")
    differs = f"plait {theirs} is installed there, and {ours} here; install the same version"
    problem = None if theirs == ours else differs
    return HostState(host.name, host.slots, at_work, theirs, problem)
