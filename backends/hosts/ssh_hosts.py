"""`SSHHosts`: hosts reached with OpenSSH, each by one command such as `ssh m3 plait host`."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from plait.backends.backend_protocol import RunOnHosts
from plait.backends.hosts.host_backend import PATIENCE, HostGroup
from plait.backends.hosts.host_connection import Channel, HostConnection, ReachableHost, open_process
from plait.backends.hosts.host_session import HostSession
from plait.json_form import value

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""The command that reaches a host: no password is asked for, and a silent connection ends after 30 seconds."""
SLOTS = 4
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@value
class SSHHost:
    """A host reached with OpenSSH."""

    name: str
    """The name in events and session ids: 1 to 64 letters, digits, `.`, `_` or `-`, not beginning with a dot."""
    slots: int = SLOTS
    """The number of attempts at once, of all runs of all users of this account on the host."""
    address: str | None = None
    """The destination for ssh, such as `user@10.0.0.3`. None uses `name`."""
    plait: str = "plait"
    """The command there, a name on the PATH of a login that is not interactive, or a path."""

    def check(self) -> None:
        """Raise ValueError for an invalid value."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"the host name {self.name!r} must have 1 to 64 letters, digits, '.', '_' or '-', and no dot first; "
                "put another destination for ssh into address"
            )
        if not 1 <= self.slots <= 1000:
            raise ValueError(f"the slots of host {self.name} must be from 1 to 1000, not {self.slots}")
        if (self.address or "").startswith("-"):
            raise ValueError(f"the address of host {self.name} must not begin with a dash: {self.address!r}")


class SSHHosts(HostGroup):
    """Hosts on which attempts run: `SSHHosts(["m1", SSHHost("m2", slots=8)])`. A text is the name of a host.

    - `ssh`: the command that reaches a host; the destination and `plait host` are added.
    - `patience`: the seconds for which the attempts of a host that does not answer are waited for. Then each attempt
      counts as crashed, and another follows on any host.

    Each host needs the same version of plait, and an ssh login without a password. Raises ValueError for invalid
    values.
    """

    def __init__(self, hosts: Sequence[str | SSHHost], *, ssh: Sequence[str] = SSH, patience: float = PATIENCE) -> None:
        super().__init__(patience)
        self.all = tuple(SSHHost(one) if isinstance(one, str) else one for one in hosts)
        """The hosts, in the order given."""
        self._ssh = tuple(ssh)
        for one in self.all:
            one.check()
        if not self.all or len(set(self.names)) < len(self.all):
            raise ValueError(f"hosts need at least one name, and each name once, not {self.names}")
        if not self._ssh:
            raise ValueError("ssh needs a command, such as ['ssh', '-F', 'config']")

    @property
    def names(self) -> Sequence[str]:
        """The names of the hosts."""
        return [one.name for one in self.all]

    @property
    def slots(self) -> int:
        """The sum of the slots of all hosts."""
        return sum(one.slots for one in self.all)

    def checked(self, needs: Mapping[str, float] | None) -> Mapping[str, float]:
        """Return one slot. Raises ValueError for `needs`."""
        if needs is not None:
            raise ValueError("needs are resources of Dask workers; hosts reached with ssh have slots: leave needs out")
        return _ONE

    def command(self, host: SSHHost, *words: str) -> tuple[str, ...]:
        """Return the command that runs `plait` with `words` on `host`."""
        return (*self._ssh, host.address or host.name, shlex.join((host.plait, *words)))

    @asynccontextmanager
    async def reachable(
        self,
        needs: Collection[Mapping[str, float] | None] = (),  # noqa: ARG002 - for hosts with resources
    ) -> AsyncGenerator[Sequence[ReachableHost]]:
        """Return the hosts, to run commands of plait there."""

        async def opened(host: SSHHost, words: Sequence[str]) -> Channel:
            return await open_process(self.command(host, *words))

        yield [ReachableHost(host.name, host.slots, partial(opened, host)) for host in self.all]

    def _new_session(self, run: RunOnHosts) -> HostSession:
        connections = (
            # The host itself gives its slots, which other runs share.
            HostConnection(host.name, run, {"slots": host.slots}, partial(open_process, self.command(host, "host")))
            for host in self.all
        )
        return HostSession(connections, self._patience, run.on_away)


_ONE: Mapping[str, float] = {"slots": 1}
