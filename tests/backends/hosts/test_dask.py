"""Attempts on the workers of a Dask cluster. Skipped where distributed is not installed."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from pydantic import TypeAdapter

pytest.importorskip("distributed")

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus, events
from plait.backends import FunctionBackend
from plait.backends.backend_specs import BackendSpec, placed, spec_description
from plait.backends.hosts.host_backend import build_described, describe
from plait.backends.hosts.host_session import slots_for
from plait.events import TaskCompleted, TaskPlaced, TaskStarted
from plait.hosts import DaskHosts, SSHHosts
from plait.persistence import SQLiteStore
from tests.backends.hosts.test_placing import GatedStore, tasks, this_one
from tests.support.hosts import functions
from tests.support.hosts.dask_cluster import DaskCluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaskCluster]:
    """m1 with room for one attempt, and m2 with room for three."""
    with DaskCluster(tmp_path_factory.mktemp("cluster"), {"m1": 1, "m2": 3}) as cluster:
        anyio.run(cluster.ready)
        yield cluster


async def test_each_place_is_stored_before_the_attempt_ends(cluster: DaskCluster, tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await ParallelRunner(cluster.hosts().placed(functions.where), store=store).run(tasks(6), "r")
        kinds: dict[str | None, list[tuple[str, str | None]]] = {}
        for event in await store.list_events("r"):
            kinds.setdefault(event.task_id, []).append((event.kind, json.loads(event.detail).get("place")))
    for number in range(6):
        started, placed, completed = kinds[f"t{number}"]
        assert (started[0], completed[0]) == (TaskStarted.kind, TaskCompleted.kind)
        assert placed == (TaskPlaced.kind, result[f"t{number}"].text)


async def test_nothing_begins_on_a_worker_before_its_place_is_stored(cluster: DaskCluster, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    hosts = cluster.hosts()
    async with GatedStore() as store, anyio.create_task_group() as group:
        group.start_soon(ParallelRunner(hosts.placed(functions.until_file), store=store).run, tasks(1, str(file)))
        await store.asked.wait()
        async with hosts.reachable() as reachable:  # by now the worker would have begun
            assert {one.name: (await one.probe()).problem for one in reachable} == {"m1": None, "m2": None}
        assert not (tmp_path / "file.begun").exists()
        store.gate.set()
    assert (tmp_path / "file.begun").exists()


async def test_attempts_go_to_the_least_loaded_worker_within_its_resources(
    cluster: DaskCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runner = ParallelRunner(cluster.hosts().placed(functions.until_file), concurrency=6)
    placed: list[str] = []
    async with runner.start(tasks(6, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                placed.append(event.place)
            if len(placed) == 4:
                gate.touch()
        result = await run.result()
    assert result.status is RunStatus.COMPLETED
    assert sorted(placed[:4]) == ["m1", "m2", "m2", "m2"]


async def test_an_attempt_takes_the_resources_that_it_needs(cluster: DaskCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    runner = ParallelRunner(cluster.hosts().placed(functions.until_file, {"agents": 2}), concurrency=6)
    placed: list[str] = []
    async with runner.start(tasks(2, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                placed.append(event.place)
                assert len(placed) == 1 or gate.exists()
                while not (tmp_path / "gate.begun").exists():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                async with cluster.hosts().reachable() as reachable:
                    states = [await host.probe() for host in reachable]
                if len(placed) == 1:
                    assert {one.name: one.at_work for one in states} == {"m1": 0, "m2": 1}
                gate.touch()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert placed == ["m2", "m2"]


@pytest.mark.parametrize(("needs", "slots"), [({"agents": 1}, 4), ({"agents": 2}, 1)])
async def test_as_many_tasks_run_at_once_as_the_workers_have_resources_for(
    cluster: DaskCluster, tmp_path: Path, needs: dict[str, float], slots: int
) -> None:
    gate = tmp_path / "gate"
    runner = ParallelRunner(cluster.hosts().placed(functions.until_file, needs), concurrency=None)
    started: list[str] = []
    placed: set[str] = set()
    async with runner.start(tasks(6, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                started.append(event.task_id)
            if isinstance(event, events.TaskPlaced) and not gate.exists():
                placed.add(event.task_id)
                if len(placed) == slots:
                    assert len(started) == slots
                    gate.touch()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_more_tasks_run_at_once_when_a_worker_joins(tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "cluster", {"m1": 1}) as cluster:
        await cluster.ready()
        cluster.agents = {"m1": 1, "m2": 3}
        gate = tmp_path / "gate"
        runner = ParallelRunner(cluster.hosts(patience=60).placed(functions.until_file), concurrency=None)
        started: list[str] = []
        places: list[str] = []
        async with runner.start(tasks(6, str(gate))) as run:
            async for event in run.events():
                if isinstance(event, events.TaskStarted):
                    started.append(event.task_id)
                if isinstance(event, events.TaskPlaced) and not gate.exists():
                    places.append(event.place)
                    assert len(started) == (1 if places == ["m1"] else 4)
                    if places == ["m1"]:
                        cluster.start_worker("m2")
                    if len(places) == 4:
                        gate.touch()
            assert (await run.result()).status is RunStatus.COMPLETED
        assert places == ["m1", "m2", "m2", "m2"]


@pytest.mark.parametrize(
    ("needs", "slots"),
    [
        ([{"agents": 0.1}], 3),
        ([{"agents": 0.1, "gpus": 1}], 2),
        ([{"agents": 0.1}, {"gpus": 1}], 5),
        ([{"agents": 0.2}], 1),
        ([{"memory": 1}], 0),
    ],
)
def test_slots_are_the_attempts_for_which_a_host_has_resources(needs: list[dict[str, float]], slots: int) -> None:
    assert slots_for({"agents": 0.3, "gpus": 2}, needs) == slots


async def test_a_worker_may_have_any_name(tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "cluster", {"gpu box@1:a": 1}) as cluster:
        await cluster.ready()
        hosts = cluster.hosts()
        async with hosts.reachable() as reachable:
            assert [(one.name, (await one.probe()).problem) for one in reachable] == [("gpu-box-1-a", None)]
        async with SQLiteStore(tmp_path / "runs.db") as store:
            result = await ParallelRunner(hosts.placed(functions.echo), store=store).run(tasks(1), "r")
            (placed,) = await store.list_events("r", kind=TaskPlaced.kind)
    assert (result.text, json.loads(placed.detail)) == ({"t0": "re: hello"}, {"place": "gpu-box-1-a"})


async def test_two_runs_share_the_resources_of_a_worker(cluster: DaskCluster, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    needs = {"agents": 3}
    async with anyio.create_task_group() as group:
        runner = ParallelRunner(cluster.hosts().placed(functions.until_file, needs))
        async with runner.start(tasks(1, str(first))) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    again = ParallelRunner(cluster.hosts().placed(functions.until_file, needs))
                    group.start_soon(again.run, tasks(1, str(second)))
                    second.touch()
                    await anyio.sleep(2.0)
                    assert not (tmp_path / "second.begun").exists()
                    first.touch()
            assert (await run.result()).status is RunStatus.COMPLETED
    assert (tmp_path / "second.begun").exists()


async def test_an_attempt_moves_to_a_worker_that_other_runs_have_not_taken(
    cluster: DaskCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    all_of_m2 = ParallelRunner(cluster.hosts().placed(functions.until_file, {"agents": 3}))
    async with all_of_m2.start(tasks(1, str(gate))) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                result = await ParallelRunner(cluster.hosts().placed(functions.where), concurrency=4).run(tasks(4))
                assert {one.text for one in result.tasks.values()} == {"m1"}
                gate.touch()


async def test_another_worker_gets_the_whole_conversation_if_its_own_is_gone(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    dag = DAG(
        [
            Task("a", "first", backend="chat"),
            Task("c", str(gate), backend="work"),
            Task("b", "second", backend="chat", continues="a", depends_on=["c"]),
        ]
    )
    places: dict[str, str] = {}
    waits: list[str] = []
    with DaskCluster(tmp_path / "cluster", {"m1": 1, "m2": 1}) as cluster:
        await cluster.ready()
        hosts = cluster.hosts(patience=1.0)
        chat, work = hosts.placed("tests.support.hosts.pydantic_ai_kind:agent"), hosts.placed(functions.until_file)
        async with (
            SQLiteStore(tmp_path / "runs.db") as store,
            ParallelRunner(backends={"chat": chat, "work": work}, store=store, concurrency=2).start(dag) as run,
        ):
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    places[event.task_id] = event.place
                if isinstance(event, events.TaskCompleted) and event.task_id == "a":
                    cluster.kill(places["a"])
                    gate.touch()
                if isinstance(event, events.TaskOutput) and event.output == "waiting" and event.task_id == "b":
                    waits.append(event.text)
            result = await run.result()
    assert result["a"].text == f"1 on {places['a']}"
    assert waits[0].startswith(f"waiting for {places['a']}, away since ")
    assert places["b"] != places["a"]
    assert result["b"].text == f"3 on {places['b']}"  # of messages, with those of the first worker


async def test_a_conversation_from_before_its_backend_was_placed_waits_for_no_host(
    cluster: DaskCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "here"))
    gate = tmp_path / "gate"
    dag = DAG(
        [
            Task("a", "first", backend="chat"),
            Task("c", str(gate), backend="work", depends_on=["a"]),
            Task("b", "second", backend="chat", continues="a", depends_on=["c"]),
        ]
    )
    agent = "tests.support.hosts.pydantic_ai_kind:agent"
    here = {"chat": build_described(describe(agent)), "work": functions.until_file}
    there = {**here, "chat": cluster.hosts(patience=600.0).placed(agent)}
    with anyio.fail_after(60):
        async with SQLiteStore(tmp_path / "runs.db") as store:
            async with ParallelRunner(backends=here, store=store).start(dag, "r") as run:
                async for event in run.events():
                    if isinstance(event, events.TaskStarted) and event.task_id == "c":
                        run.stop()
            gate.touch()
            result = await ParallelRunner(backends=there, store=store).resume("r")
    assert result["a"].text == "1 on here"
    assert result["b"].text in {"3 on m1", "3 on m2"}  # of messages, with those from here


async def test_an_attempt_that_waits_for_a_taken_worker_moves_to_one_that_joins(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with DaskCluster(tmp_path / "cluster", {"m1": 1}) as cluster, anyio.fail_after(60):
        await cluster.ready()
        cluster.agents = {"m1": 1, "m2": 1}
        async with ParallelRunner(cluster.hosts().placed(functions.until_file)).start(tasks(1, str(gate))) as first:
            async for event in first.events():
                if isinstance(event, events.TaskPlaced):
                    async with ParallelRunner(cluster.hosts().placed(functions.where)).start(tasks(1)) as second:
                        async for started in second.events():
                            if isinstance(started, events.TaskStarted):
                                cluster.start_worker("m2")
                                break
                        assert (await second.result())["t0"].text == "m2"
                    gate.touch()


async def test_errors_and_questions_of_a_function_come_back(cluster: DaskCluster) -> None:
    hosts = cluster.hosts()
    backends = {"bad": hosts.placed(functions.failing), "ask": hosts.placed(functions.asking)}
    runner = ParallelRunner(backends=backends, on_question=this_one)
    result = await runner.run(DAG([Task("a", backend="bad", prompt="x"), Task("b", backend="ask", prompt="take")]))
    assert (result["a"].error_kind, result["a"].error) == ("refused", "not this one")
    assert result["b"].text == "take: this one"


async def test_another_version_is_refused_by_name(cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.hosts.host_connection.version", lambda _: "9.9.9")
    result = await ParallelRunner(cluster.hosts().placed(functions.where)).run(tasks(1))
    assert result["t0"].error_kind == "unavailable"
    assert "m1: plait 0.1.0 is installed there, and 9.9.9 here; install the same version" in (result["t0"].error or "")


async def test_resources_that_no_worker_has_are_named(cluster: DaskCluster) -> None:
    runner = ParallelRunner(cluster.hosts(patience=0.1).placed(functions.where, {"gpus": 2}))
    result = await runner.run(DAG([Task("a", "x", retry=0)]))
    assert result["a"].error == f"no worker of {cluster.address} can be used with --resources gpus=2"


async def test_the_first_connection_to_a_worker_takes_none_of_the_patience(cluster: DaskCluster) -> None:
    runner = ParallelRunner(cluster.hosts(patience=0).placed(functions.where))
    result = await runner.run(DAG([Task("a", "x", retry=0)]))
    assert result["a"].text in {"m1", "m2"}, result["a"].error


async def test_a_scheduler_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    away = DaskCluster(tmp_path / "away", {})
    result = await ParallelRunner(away.hosts().placed(functions.where)).run(DAG([Task("a", "x", retry=0)]))
    assert result["a"].status is TaskStatus.FAILED
    assert (result["a"].error or "").startswith(f"the scheduler {away.address} cannot be used: ")


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("tcp://10.0.0.3:8786", "has neither encryption nor authentication"),
        ("tcp://sched:8786", "has neither encryption nor authentication"),
        ("10.0.0.3:8786", "is tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine"),
        ("tls://sched", "is tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine"),
        ("ws://127.0.0.1:8786", "is tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine"),
    ],
)
def test_an_address_beyond_this_machine_needs_tls(address: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DaskHosts(address)
    assert DaskHosts("tls://sched:8786").names == ["tls://sched:8786"]


@pytest.mark.parametrize("needs", [{}, {"agents": 0}, {"agents": float("inf")}])
def test_needs_are_positive_numbers(needs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needs must have positive numbers by name"):
        FunctionBackend(functions.where).on(DaskHosts("tls://sched:8786"), needs)
    with pytest.raises(ValueError, match="hosts reached with ssh have slots"):
        FunctionBackend(functions.where).on(SSHHosts(["m1"]), needs)


@pytest.mark.parametrize("kind", ["claude-code", "codex", "openai", "anthropic"])
def test_each_kind_of_a_plan_takes_resources(kind: str, tmp_path: Path) -> None:
    spec = TypeAdapter[Any](BackendSpec).validate_python(
        {"kind": kind, "model": "m", "on": "fleet", "needs": {"gpus": 1}}
    )
    backend = placed(spec, tmp_path, DaskHosts("tls://sched:8786"))
    assert "needs" not in cast("dict[str, Any]", spec_description(spec, tmp_path)["spec"])
    assert backend.needs == {"gpus": 1}
