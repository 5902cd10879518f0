"""The start of each node is an event of the run: published, stored, and shown over HTTP and by `plait log`."""

from __future__ import annotations

import json
from pathlib import Path

import anyio

from plait import DAG, ParallelRunner, SQLiteStore, Task, events
from plait.backends import LangGraphBackend
from plait.results import EventView
from tests.support.fakes import Talker
from tests.support.graphs import Work, chain, kept
from tests.support.processes.command import plait_here
from tests.support.processes.served import heard, served

PLAN = DAG([Task("report", "p")])
NAMES = ["first", "nested", "last"]


def first(_state: Work) -> dict[str, list[str]]:
    return {"done": ["first"]}


def inner(_state: Work) -> dict[str, list[str]]:
    return {"done": ["inner"]}


async def last(_state: Work) -> dict[str, list[str]]:
    return {"done": ["last"]}


async def run_graph(folder: Path) -> str:
    """Run a graph of the nodes first, nested (with the node inner) and last, and return the id of the run."""
    graph = chain(first, last)
    graph.edges.remove(("first", "last"))
    graph.add_node("nested", chain(inner).compile()).add_edge("first", "nested").add_edge("nested", "last")
    (folder / ".plait").mkdir()
    async with SQLiteStore(folder / ".plait" / "plait.db") as store, kept(graph, folder / "threads.db") as compiled:
        async with ParallelRunner(LangGraphBackend(compiled), store=store).start(PLAN) as run:
            told = [event async for event in run.events() if isinstance(event, events.NodeStarted)]
        assert [(one.task_id, one.attempt, one.node) for one in told] == [("report", 1, name) for name in NAMES]
        return run.run_id


async def list_events(folder: Path, run_id: str) -> list[EventView]:
    async with (
        SQLiteStore(folder / ".plait" / "plait.db") as store,
        ParallelRunner(Talker(), store=store).runs as service,
    ):
        return [event async for event in service.events(run_id)]


def test_the_start_of_a_node_is_an_event(tmp_path: Path) -> None:
    run_id = anyio.run(run_graph, tmp_path)
    stored = anyio.run(list_events, tmp_path, run_id)
    nodes = [(event.task_id, event.attempt, event.detail) for event in stored if event.kind == "node_started"]
    assert nodes == [("report", 1, {"node": name}) for name in NAMES]
    assert [event.kind for event in stored[-2:]] == ["task_completed", "run_completed"]

    log = plait_here(tmp_path, "log", run_id).out.splitlines()
    assert [line.split()[1:] for line in log if " node " in line] == [["report", "node", name] for name in NAMES]
    entries = [json.loads(line) for line in plait_here(tmp_path, "log", run_id, "--json").out.splitlines()]
    assert [one["detail"] for one in entries if one["kind"] == "node_started"] == [{"node": name} for name in NAMES]

    with (
        served(tmp_path) as server,
        server.client() as client,
        client.stream("GET", f"/api/runs/{run_id}/events") as response,
    ):
        seen = [one.data["detail"] for one in heard(response) if one.event == "node_started"]
    assert seen == [{"node": name} for name in NAMES]
