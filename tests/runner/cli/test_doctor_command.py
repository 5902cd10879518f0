"""`plait doctor`: what it finds in a machine, a place, a file and the runs in it."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task
from plait.errors import BackendError, ErrorKind
from plait.persistence import SQLiteStore
from plait.persistence.store_health import Verdict, file, library
from tests.support.fakes import QuickClock, Talker
from tests.support.plans.logged import make, wait_for_call
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm
from tests.support.stores.database import attempts_of, edit
from tests.support.stores.database import make as make_store

TASKS = '  - {id: a, prompt: one}\n  - {id: b, prompt: "two {{ a }}", depends_on: a}\n'
STORE = Path(".plait") / "plait.db"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, TASKS, hold="hold")
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "kept" / "runs.db"
    anyio.run(make_store, path)
    return path


@contextmanager
def under_way(folder: Path) -> Generator[Warm]:
    """A run of the plan in `folder` that holds at its last call; killed at the end."""
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as running:
        try:
            wait_for_call(folder, "wait")
            yield running
        finally:
            running.kill()


def checks(value: dict[str, Any], name: str) -> list[tuple[str, str]]:
    return [(one["verdict"], one["found"]) for one in value["checks"] if one["check"] == name]


def advice(value: dict[str, Any], name: str) -> list[str]:
    return [one["advice"] for one in value["checks"] if one["check"] == name]


def examined(store: Path, code: int) -> dict[str, Any]:
    done = plait_here(store.parent.parent, "doctor", "--store", str(store), "--json")
    assert (done.code, done.err) == (code, "")
    return done.value


def test_a_good_store_is_fit_and_stays_as_it_is(folder: Path) -> None:
    assert plait(folder, "run", "plan.yaml", "-q").code == 0
    before = (folder / STORE).read_bytes()
    done = plait(folder, "doctor")
    assert (done.code, done.err) == (0, "")
    lines = {line.split()[1]: line for line in done.out.splitlines()}
    assert not any(line.startswith("bad") for line in lines.values()), done.out
    assert lines["checksums"].split(maxsplit=2) == ["ok", "checksums", "all fit (results: 2, messages: 4)"]
    assert lines["permissions"].startswith("ok ")
    assert lines["pages"].startswith("ok ")
    assert lines["runs"].endswith("1 run, none running or interrupted")
    assert (folder / STORE).read_bytes() == before
    assert plait_here(folder, "doctor", "--json").value["verdict"] in {"ok", "warning"}


def test_without_a_store_only_the_machine_is_looked_at(tmp_path: Path) -> None:
    done = plait_here(tmp_path, "doctor")
    assert (done.code, done.err) == (0, "")
    assert "no store at .plait/plait.db yet; `plait run PLAN` makes one" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "does not exist"), (b"", "is empty"), (b"text" * 2000, "not a database"), ("folder", "is not a file")],
)
def test_what_is_no_store_is_bad_and_left_alone(tmp_path: Path, content: bytes | str | None, said: str) -> None:
    path = tmp_path / "x.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    done = plait_here(tmp_path, "doctor", "--store", "x.db")
    assert done.code == 3
    assert said in done.out
    assert sorted(one.name for one in tmp_path.iterdir()) == (["x.db"] if content is not None else [])
    assert not isinstance(content, bytes) or path.read_bytes() == content


@pytest.mark.parametrize("place", ["/", "", "no/such/folder/x.db"])
def test_odd_places_are_bad_without_a_traceback(tmp_path: Path, place: str) -> None:
    done = plait_here(tmp_path, "doctor", "--store", place)
    assert (done.code, done.err) == (3, "")
    assert list(tmp_path.iterdir()) == []


def test_foreign_and_newer_files_are_bad(store: Path) -> None:
    edit(store, "PRAGMA user_version = 1000")
    assert "made by a newer plait (database format 1000)" in checks(examined(store, 3), "file")[0][1]
    edit(store, "PRAGMA application_id = 7")
    assert "belongs to another program" in checks(examined(store, 3), "file")[0][1]


def test_a_damaged_result_and_a_damaged_message_are_named(store: Path) -> None:
    edit(store, attempts_of("a", "text = 'something else'"))
    value = examined(store, 3)
    assert checks(value, "pages") == [("ok", "whole")]
    [(step, found)] = checks(value, "checksums")
    assert (step, found) == ("bad", "damaged: run-1/a (results: 1, messages: 2)")
    edit(store, "UPDATE messages SET content = CAST(x'ff' AS TEXT)")
    assert checks(examined(store, 3), "checksums")[0][0] == "bad"


async def fill(path: Path, tasks: int, answer: str) -> None:
    """Store a run of `tasks` tasks that all answer `answer`, each at its second attempt."""
    seen = set[str]()

    async def say(prompt: str) -> str:
        if prompt in seen:
            return answer
        seen.add(prompt)
        raise BackendError(ErrorKind.TRANSIENT, f"{prompt} later")

    async with SQLiteStore(path) as store:
        dag = DAG([Task(f"t{n}", f"p{n}", retry=Retry(attempts=2, base_delay=0)) for n in range(tasks)])
        result = await ParallelRunner(say, store=store, clock=QuickClock()).run(dag, "r")
    assert result.status is RunStatus.COMPLETED


def found_in_file(path: Path) -> str:
    return next(one.found for one in file(path) if one.check == "checksums")


@pytest.mark.slow
async def test_a_large_run_is_checked_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    await fill(path, 300, "x" * 50_000)
    tracemalloc.start()
    assert found_in_file(path) == "all fit (results: 300, messages: 600)"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000, f"{peak:,} bytes for results of 15 MB"


DAMAGE = {
    "the prompt of a late task": "UPDATE tasks SET prompt = 'other' WHERE task_id = 't39'",
    "an event behind the first page": "UPDATE events SET kind = 'other' WHERE kind = 'run_completed'",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_is_found_on_each_page(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "runs.db"
    await fill(path, 1100 if "event" in damage else 40, "x")
    assert found_in_file(path).startswith("all fit")
    edit(path, DAMAGE[damage])
    assert found_in_file(path).startswith("damaged: ")


def test_what_was_damaged_and_is_mended_is_not_told_any_more(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "runs.db"

    async def run(*, again: bool) -> None:
        async with SQLiteStore(path) as store:
            runner = ParallelRunner(Talker(), store=store)
            dag = DAG([Task("a", prompt="A"), Task("b", prompt="B {{ a }}", depends_on=["a"])])
            result = await (runner.resume("r", retry_failed=True) if again else runner.run(dag, "r"))
            assert result.status is RunStatus.COMPLETED

    anyio.run(lambda: run(again=False))
    edit(path, attempts_of("a", "text = 'tampered'"))
    assert checks(examined(path, 3), "checksums")[0][0] == "bad"
    anyio.run(lambda: run(again=True))
    assert checks(examined(path, 0), "checksums") == [("ok", "all fit (results: 2, messages: 5)")]


def test_damaged_pages_are_found(store: Path) -> None:
    edit(store, "PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(store.read_bytes())
    for start in range(4096 + 64, len(content), 4096):
        content[start : start + 2000] = b"\xa5" * 2000
    store.write_bytes(content)
    value = examined(store, 3)
    assert value["verdict"] == "bad"
    assert [one for name in ("pages", "file") for one in checks(value, name) if one[0] == "bad"]


def test_what_others_may_read_is_a_warning(store: Path) -> None:
    store.chmod(0o644)
    store.parent.chmod(0o755)
    value = examined(store, 0)
    assert value["verdict"] == "warning"
    assert [step for step, _ in checks(value, "permissions")] == ["warning"] * 2
    assert advice(value, "permissions") == [
        f"chmod 700 {store.parent}, or keep the store in a directory of its own",
        f"chmod 600 {store}",
    ]


def test_a_large_wal_is_a_warning(store: Path) -> None:
    wal = store.with_name("runs.db-wal")
    wal.touch(0o600)
    os.truncate(wal, 65 << 20)
    value = examined(store, 0)
    assert checks(value, "wal")[0] == ("warning", "68.2 MB")


def test_runs_under_way_and_interrupted_ones(folder: Path) -> None:
    plan = folder / "plan.yaml"
    plan.write_text(plan.read_text() + "  - {id: c, prompt: wait, backend: hold}\n")
    with under_way(folder) as running:
        [(step, found)] = checks(plait_here(folder, "doctor", "--json").value, "runs")
        assert step == "ok"
        assert f"is being run by process {running.pid} on " in found
    done = plait_here(folder, "doctor", "--json")
    assert done.code == 0
    [(step, found)] = checks(done.value, "runs")
    assert step == "warning"
    assert f"is interrupted: process {running.pid} on " in found
    assert found.endswith(" is gone")
    run_id = found.split()[0]
    assert advice(done.value, "runs") == [f"plait resume {run_id}"]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ((3, 36, 0), Verdict.BAD),
        ((3, 37, 0), Verdict.WARNING),
        ((3, 44, 5), Verdict.WARNING),
        ((3, 44, 6), Verdict.OK),
        ((3, 45, 0), Verdict.WARNING),
        ((3, 50, 6), Verdict.WARNING),
        ((3, 50, 7), Verdict.OK),
        ((3, 51, 0), Verdict.WARNING),
        ((3, 51, 2), Verdict.WARNING),
        ((3, 51, 3), Verdict.OK),
        ((3, 54, 1), Verdict.OK),
    ],
)
def test_versions_of_sqlite(version: tuple[int, int, int], verdict: Verdict) -> None:
    assert library(version).verdict is verdict
