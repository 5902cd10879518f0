"""Plans whose backends run on a Dask cluster, and the commands about it. Skipped where distributed is not installed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest

pytest.importorskip("distributed")

from tests.support.agents.logs import LIMIT
from tests.support.hosts.dask_cluster import DaskCluster
from tests.support.processes import command

pytestmark = pytest.mark.slow

plait = partial(command.plait, loaded=("distributed",))

FUNCTIONS = """
import os
from pathlib import Path

async def where(prompt):
    return f"{prompt} on {Path(os.environ['XDG_STATE_HOME']).name}"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaskCluster]:
    with DaskCluster(tmp_path_factory.mktemp("cluster"), {"m1": 2, "m2": 3}) as cluster:
        anyio.run(cluster.ready)
        yield cluster


def write_plan(folder: Path, address: str, **backend: object) -> None:
    """Write a plan with the group `fleet` at `address`."""
    work = {"kind": "function", "call": "functions.py:where", "on": "fleet", **backend}
    plan: dict[str, object] = {
        "hosts": {"fleet": {"kind": "dask", "address": address, "patience": LIMIT}},
        "backends": {"work": work},
        "tasks": [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "{{ a }}; again", "depends_on": "a"}],
    }
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.json").write_text(json.dumps(plan))


def test_a_plan_runs_on_the_cluster_that_it_names(cluster: DaskCluster, tmp_path: Path) -> None:
    write_plan(tmp_path, cluster.address, needs={"agents": 3})
    done = plait(tmp_path, "run", "plan.json", "-v")
    assert done.code == 0, done.err
    assert "hello on m2; again on m2" in done.out
    assert " a runs on m2\n" in done.err
    assert "distributed" not in done.err
    assert plait(tmp_path, "show", "last", "a", "--json").value["history"][0]["place"] == "m2"
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        (settings,) = database.execute("SELECT settings FROM runs").fetchone()
    assert json.loads(settings)["concurrency"] is None  # as many as the workers have room for


def test_workers_and_their_state_are_listed_and_visited(cluster: DaskCluster, tmp_path: Path) -> None:
    write_plan(tmp_path, cluster.address)
    done = plait(tmp_path, "doctor", "--hosts", "plan.json")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.partition("\n\n")[0].splitlines()]
    assert sorted(rows[1:]) == [
        ["fleet", "m1", "2", "0", "0.1.0", "ready"],
        ["fleet", "m2", "3", "0", "0.1.0", "ready"],
    ]
    write_plan(tmp_path, cluster.address, needs={"agents": 1.5})
    rows = plait(tmp_path, "doctor", "--hosts", "plan.json", "--json").value["hosts"]
    assert {one["name"]: one["slots"] for one in rows} == {"m1": 1, "m2": 2}
    write_plan(tmp_path, cluster.address)
    done = plait(tmp_path, "doctor", "--hosts", "plan.json", "--json", HOME=str(tmp_path))
    assert "m2: codex" in {one["check"] for one in done.value["checks"]}


def test_a_scheduler_that_is_away_is_named(tmp_path: Path) -> None:
    away = DaskCluster(tmp_path / "away", {}).address
    write_plan(tmp_path, away)
    done = plait(tmp_path, "doctor", "--hosts", "plan.json")
    assert done.code == 3
    assert f"away: the scheduler {away} cannot be used" in done.out
    assert "distributed" not in done.err


def test_a_cluster_without_resources_is_named(tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "cluster", {}) as cluster:
        write_plan(tmp_path, cluster.address)
        done = plait(tmp_path, "doctor", "--hosts", "plan.json")
    assert done.code == 3
    assert " ".join(done.out.splitlines()[1].split()) == (
        f"fleet {cluster.address} 0 no worker that offers resources; start workers, with --resources"
    )


def test_a_cluster_with_tls_takes_the_certificates_of_dask(tmp_path: Path) -> None:
    cluster = DaskCluster(tmp_path / "cluster", {"m1": 2}, host="0.0.0.0")
    settings = cluster.use_tls()
    with cluster:
        write_plan(tmp_path, cluster.address)
        done = plait(tmp_path, "run", "plan.json", loaded=(), **settings)  # Dask takes the settings when imported
        assert (done.code, done.out.strip()) == (0, "hello on m1; again on m1"), done.err
        refused = plait(tmp_path, "doctor", "--hosts", "plan.json")
    assert refused.code == 3
    assert f"the scheduler {cluster.address} cannot be used: TLS" in refused.out
    assert "Traceback" not in refused.err


def test_a_cluster_that_others_reach_without_tls_is_refused(tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "cluster", {}, host="0.0.0.0") as cluster:
        write_plan(tmp_path, cluster.address)
        done = plait(tmp_path, "doctor", "--hosts", "plan.json")
    assert done.code == 3
    assert "listens on tcp://0.0.0.0" in done.out
    assert "without TLS: whoever reaches it executes code" in done.out


def test_a_worker_that_others_reach_without_tls_is_refused(tmp_path: Path) -> None:
    with DaskCluster(tmp_path / "cluster", {"m1": 2}, worker_host="0.0.0.0") as cluster:
        anyio.run(cluster.ready)
        write_plan(tmp_path, cluster.address)
        shown = plait(tmp_path, "doctor", "--hosts", "plan.json")
        (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text().replace(str(LIMIT), "1"))
        ran = plait(tmp_path, "run", "plan.json")
    assert (shown.code, ran.code) == (3, 1), ran.err
    for said in (shown.out, ran.err):
        assert "listens on tcp://0.0.0.0" in " ".join(said.split())


@pytest.mark.parametrize(
    ("address", "backend", "told"),
    [
        ("tcp://10.0.0.3:8786", {}, "tcp://10.0.0.3:8786 has neither encryption nor authentication"),
        ("sched:8786", {}, "the address of a Dask scheduler is tls://HOST:PORT"),
        ("tls://sched:8786", {"needs": {"agents": 0}}, "needs must be positive numbers"),
        ("tls://sched:8786", {"on": None, "needs": {"agents": 1}}, "name the hosts with `on`, or leave `needs` out"),
    ],
)
def test_a_plan_names_its_cluster_rightly(tmp_path: Path, address: str, backend: dict[str, object], told: str) -> None:
    write_plan(tmp_path, address, **backend)
    done = plait(tmp_path, "run", "plan.json")
    assert (done.code, done.out, "Traceback" in done.err) == (2, "", False)
    assert told in done.err


def test_hosts_reached_with_ssh_have_no_resources(tmp_path: Path) -> None:
    write_plan(tmp_path, "tls://sched:8786", needs={"agents": 1})
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["hosts"] = {"fleet": {"kind": "ssh", "hosts": ["m1"]}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = plait(tmp_path, "check", "plan.json")
    assert (done.code, "backends.work.needs: hosts reached with ssh have slots" in done.err) == (2, True)
