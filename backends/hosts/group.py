"""`HostGroup`: base of the groups of hosts, with a session for each run that uses the hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from importlib.metadata import version

import anyio

from plait.backends.backend_protocol import RunOnHosts
from plait.backends.hosts.host_frames import Frame
from plait.backends.hosts.host_session import HostSession

PATIENCE = 120.0
"""Seconds for which the attempts of a host that is away are waited for, unless told otherwise."""


class HostGroup(ABC):
    """A group of hosts. Raises ValueError if `patience` is no number of seconds."""

    def __init__(self, patience: float) -> None:
        if not 0 <= patience < float("inf"):
            raise ValueError(f"patience must be 0 seconds or more, not {patience}")
        self._patience = patience
        self._sessions: dict[str, HostSession] = {}

    def session(self, run_id: str) -> HostSession | None:
        """Return the session of a connected run; None without one."""
        return self._sessions.get(run_id)

    @asynccontextmanager
    async def connected(self, run: RunOnHosts) -> AsyncGenerator[HostSession]:
        """Connect the hosts for the attempts of `run`; leaving disconnects them. Attempts not ended go on there."""
        session = self._sessions[run.run_id] = self._new_session(run)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(session.run)
                try:
                    yield session
                finally:
                    session.close()
        finally:
            del self._sessions[run.run_id]

    @abstractmethod
    def _new_session(self, run: RunOnHosts) -> HostSession:
        """Return the session of a run, not connected yet."""


def hello_frame(run: RunOnHosts, host: str, slots: int, kept: Collection[str]) -> Frame:
    """Return the first frame to `host`. The host ends the attempts of the run that are not in `kept`."""
    return {
        "op": "hello",
        "version": version("plait"),
        "key": run.key,
        "host": host,
        "epoch": run.epoch,
        "slots": slots,
        "keep": sorted(kept),
    }
