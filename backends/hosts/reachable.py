"""Hosts on which a command of plait can be run, outside of any run: for `plait doctor --hosts`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from plait.json_form import value


class HostUnreachable(Exception):  # noqa: N818 - reads as what it is
    """A host, or the way to all hosts, cannot be used. The message has the reason."""


@value
class CommandResult:
    """The end of a command."""

    code: int | None
    """The exit code; None if the connection broke."""
    output: bytes
    """All of standard output."""
    errors: str
    """The last line of standard error."""


class ReachableHost(Protocol):
    """A host."""

    @property
    def name(self) -> str:
        """The name."""
        ...

    @property
    def slots(self) -> int:
        """The number of attempts at once."""
        ...

    async def run(self, words: Sequence[str], data: bytes = b"") -> CommandResult:
        """Run `plait` with `words` there, with `data` as standard input. Raises HostUnreachable."""
        ...


class ReachableHosts(Protocol):
    """A group of hosts."""

    def reachable(
        self, needs: Collection[Mapping[str, float] | None] = ()
    ) -> AbstractAsyncContextManager[Sequence[ReachableHost]]:
        """Return the hosts, which can be used within the context, with slots for attempts of the kinds `needs`.

        Raises HostUnreachable if there is no way to any.
        """
        ...
