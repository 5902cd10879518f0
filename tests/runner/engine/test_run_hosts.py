"""Connections of a run to several groups of hosts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from plait.backends import FunctionBackend
from plait.backends.backend_protocol import Backend, RunOnHosts
from plait.runner.engine.run_lifecycle import end_on_hosts, run_on_hosts


class Group:
    """A group of one host, which is known to be reached once all groups have been asked."""

    def __init__(self, name: str, asked: list[str], count: int, news: anyio.Event) -> None:
        self.names = [name]
        self._asked, self._count, self._news = asked, count, news

    def placed(self, backend: object, needs: Mapping[str, float] | None = None) -> Backend:
        raise NotImplementedError

    @asynccontextmanager
    async def connected(self, run: RunOnHosts) -> AsyncGenerator[Group]:
        yield self

    async def reached(self) -> Sequence[str]:
        self._asked += self.names
        if len(self._asked) == self._count:
            self._news.set()
        await self._news.wait()
        return self.names

    async def more_slots(self, known: int) -> int:
        raise NotImplementedError

    def remove_files(self) -> None:
        pass


class Placed(FunctionBackend):
    def __init__(self, hosts: Group) -> None:
        super().__init__(str)
        self.hosts = hosts


async def test_the_hosts_of_all_groups_are_waited_for_at_once() -> None:
    asked, news = list[str](), anyio.Event()
    backends = [Placed(Group(name, asked, 2, news)) for name in ("m1", "m2")]
    run = run_on_hosts("r", "2026-01-01T00:00:00Z", 1)
    with anyio.fail_after(60):
        left = await end_on_hosts(backends, run, {"m1": ["a"], "m2": ["b"], "m3": ["c"]})
    assert (left, sorted(asked)) == ({"m3": ["c"]}, ["m1", "m2"])
