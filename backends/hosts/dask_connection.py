"""`WorkerConnection`: the connection of a run to one worker of a Dask cluster. Attempts take the worker's resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import anyio

from plait.backends.hosts.dask_cluster import Cluster, ClusterError, DaskWorker, Future
from plait.backends.hosts.dask_remote import CLOSE_S, Comm, RemoteOutput, close
from plait.backends.hosts.host_connection import AttemptChannel, FrameReader, HostConnection
from plait.backends.hosts.host_frames import Frame


class WorkerConnection(HostConnection):
    """The connection to the host `name`, for as long as a worker has this name.

    `token` tells the relays of this process and run from others.
    """

    def __init__(self, name: str, token: str, hello: Callable[[], Frame]) -> None:
        super().__init__(name, 1, (), hello)
        self.resources: Mapping[str, float] = {}
        self.is_taken_until = 0.0
        """The time, of the event loop, until which other runs are taken to have the resources."""
        self._token = token
        self._cluster: Cluster | None = None
        self._worker: str | None = None
        self._found = anyio.Event()
        self._opening = anyio.CancelScope()
        self._numbers = count()
        self._held: dict[str, Future] = {}
        """The tasks of Dask that hold the resources, by attempt."""
        self._asked: set[str] = set()
        """The attempts that wait for room."""
        self._freed: list[str] = []

    def use_worker(self, cluster: Cluster, worker: DaskWorker) -> None:
        """Use the worker that has the name of the host now."""
        self.resources = worker.resources
        changed = cluster is not self._cluster
        if changed or worker.address != self._worker:
            self._opening.cancel()
        self._cluster, self._worker = cluster, worker.address
        self._found.set()
        if changed and self.is_connected:  # the scheduler no longer counts the resources taken
            self._hold_all()

    def lose_worker(self, reason: str) -> None:
        """Use no worker until `use_worker`. An existing connection goes on."""
        self._worker = None
        if self._found.is_set():
            self._found = anyio.Event()
        self._opening.cancel()
        if not self.is_connected and self.reason != reason:
            self._lost(reason)

    def offers(self, needs: Mapping[str, float]) -> bool:
        """Return whether the worker has the resources `needs`, taken or not."""
        return all(self.resources.get(name, 0) >= need for name, need in needs.items())

    def load(self, needs: Mapping[str, float]) -> float | None:
        """Return the largest part of a needed resource that attempts of this process take; None without room."""
        if not self.is_connected or anyio.current_time() < self.is_taken_until:
            return None
        parts: list[float] = []
        for name, amount in needs.items():
            taken = sum(attempt.needs.get(name, 0) for attempt in self.attempts.values())
            if taken + amount > self.resources.get(name, 0):
                return None
            parts.append(taken / self.resources[name])
        return max(parts)

    def ask(self, attempt: AttemptChannel) -> None:
        """Ask Dask for the resources of an attempt."""
        self._asked.add(attempt.name)
        self._hold(attempt)

    def release(self, attempt: AttemptChannel) -> None:
        """Free the resources of an attempt."""
        self._asked.discard(attempt.name)
        if (future := self._held.pop(attempt.name, None)) is not None:
            future.release()
        self._free(attempt.name)
        super().release(attempt)

    def _hold(self, attempt: AttemptChannel) -> None:
        if self._cluster is not None and self._worker is not None:
            number = next(self._numbers)
            self._held[attempt.name] = self._cluster.hold(
                self._worker, self._token, attempt.name, number, attempt.needs
            )

    def _hold_all(self) -> None:
        for attempt in self.attempts.values():
            self._hold(attempt)

    def _free(self, name: str) -> None:
        if self.is_connected:
            self._freed.append(name)
            self._to_send.set()

    def _accepted(self) -> None:
        super()._accepted()
        self._hold_all()  # the attempts of an earlier connection

    async def _connect(self) -> None:
        await self._found.wait()
        assert self._cluster is not None
        assert self._worker is not None
        comm = None
        try:
            with anyio.CancelScope() as self._opening:
                comm = await self._cluster.open(self._worker, ("host",), self._token)
        except ClusterError as error:
            self._lost(str(error))
        if comm is not None:
            await self._talk(comm)

    async def _talk(self, comm: Comm) -> None:
        reason, remote = "", RemoteOutput(comm, self._on_held)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._send_messages, comm)
                reason = await self._read(FrameReader(remote.receive), lambda data: comm.write({"data": data}))
                group.cancel_scope.cancel()
        finally:
            await close(comm)
        self._lost(reason or remote.errors or "the connection to the worker broke")

    def _lost(self, reason: str) -> None:
        for future in self._held.values():
            future.release()
        self._held.clear()
        self._asked.clear()
        self._freed.clear()
        super()._lost(reason)

    async def _send_messages(self, comm: Comm) -> None:
        """Send the waiting frames, and end the input of the process at `close`."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake_at_close)
            with suppress(OSError):
                while True:
                    await self._to_send.wait()
                    self._to_send = anyio.Event()
                    message: dict[str, Any] = {}
                    if self._unsent:
                        message["data"], self._unsent = bytes(self._unsent), bytearray()
                    if self._freed:
                        message["free"], self._freed = self._freed, []
                    if message:
                        await comm.write(message)
                    if self._closing.is_set() and not self._unsent:
                        await comm.write({"data": b""})
                        await anyio.sleep(CLOSE_S)  # `_read` ends before
                        comm.abort()
                        return

    async def _wake_at_close(self) -> None:
        await self._closing.wait()
        self._to_send.set()

    def _on_held(self, name: str) -> None:
        """Give an attempt its room. Free the room if no attempt wants it: Dask has begun a task again."""
        attempt = self.attempts.get(name)
        if attempt is None:
            self._free(name)
        elif name in self._asked:
            self._asked.discard(name)
            attempt.put({"op": "slot", "attempt": name})
