"""The attempts of a run that may be under way on other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.persistence import MemoryStore
from tests.support.hosts import functions
from tests.support.hosts.world import HostFolder


async def test_no_attempt_whose_host_reported_an_end_is_under_way(tmp_path: Path) -> None:
    world = HostFolder(tmp_path / "hosts")
    hosts = world.hosts("m1")
    backends = {
        name: hosts.placed(one)
        for name, one in {"asks": functions.asking, "fails": functions.failing, "answers": functions.echo}.items()
    }
    async with MemoryStore() as store:
        runner = ParallelRunner(backends=backends, store=store)
        result = await runner.run(DAG(Task(name, "x", backend=name, retry=0) for name in backends), "r")
        assert result.status is RunStatus.WAITING_INPUT
        world.set_away("m1")
        unreached: dict[str, Sequence[str]] = {}
        assert await runner.runs.cancel("r", on_unreached=unreached.update) is RunStatus.CANCELLED
    assert unreached == {}
