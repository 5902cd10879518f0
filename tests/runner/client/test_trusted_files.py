"""The files that a worker trusts: those in folders named to it, and those that only its user and root may change."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, SQLiteStore, Task
from plait.errors import InvalidRequest
from plait.persistence import MemoryStore
from plait.runner.client import run_backends
from plait.runner.client.run_backends import (
    BackendOptions,
    FileOptions,
    backend_set_of_file,
    backend_set_of_plan,
    called_plan_data,
    queue_run,
    why_untrusted,
)
from plait.runner.client.runs import Runs
from plait.runner.plan.plan_file import Plan
from plait.runner.state.stored_run import stored_run
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.processes.fleet import until
from tests.support.processes.warm import Warm

ANN, BOB = 54_321, 54_322
"""Users without a name."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to others")
STORE = Path(".plait/plait.db")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "plans" / "of-mine"
    folder.mkdir(parents=True, mode=0o755)
    file = folder / "plan.yaml"
    file.write_text("tasks: []\n")
    file.chmod(0o644)
    return file


def test_a_file_of_the_worker_is_trusted(plan: Path) -> None:
    assert why_untrusted(plan, []) is None
    assert why_untrusted(plan.parent, []) is None
    assert why_untrusted(plan.parent / "gone.yaml", []) is None, "reported when it is read"


@pytest.mark.parametrize("what", ["the file", "its folder", "a folder above"])
def test_a_file_that_others_may_write_to_is_not(plan: Path, what: str) -> None:
    part = {"the file": plan, "its folder": plan.parent, "a folder above": plan.parent.parent}[what]
    part.chmod(part.stat().st_mode | 0o002)
    assert why_untrusted(plan, []) == f"every user may write to {part}"
    assert why_untrusted(plan.parent / "gone.yaml", []) == (None if part is plan else f"every user may write to {part}")
    assert why_untrusted(plan, [plan.parent]) is None
    assert why_untrusted(plan, [plan.parent.parent]) is None
    assert why_untrusted(plan, [plan.parent / "deeper", plan.parent.with_name("of")]) is not None


@as_root
@pytest.mark.parametrize("what", ["the file", "its folder", "a folder above"])
def test_a_file_of_another_user_is_not(plan: Path, what: str) -> None:
    part = {"the file": plan, "its folder": plan.parent, "a folder above": plan.parent.parent}[what]
    os.chown(part, ANN, -1)
    assert why_untrusted(plan, []) == f"{part} belongs to user {ANN}"
    assert why_untrusted(plan, [plan.parent]) is None


@as_root
def test_a_group_of_several_may_not_write(plan: Path) -> None:
    plan.chmod(0o664)
    assert why_untrusted(plan, []) is None, "the group of root has only root"
    os.chown(plan, 0, BOB)
    assert why_untrusted(plan, []) == f"the group {BOB} may write to {plan}"


@as_root
def test_a_sticky_folder_is_safe_for_what_one_owns_in_it_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        folder = Path(shared).resolve()
        folder.chmod(0o1777)
        mine, theirs = folder / "mine.yaml", folder / "theirs.yaml"
        for file in (mine, theirs):
            file.touch(0o644)
        os.chown(theirs, ANN, -1)
        assert why_untrusted(mine, []) is None
        assert why_untrusted(theirs, []) == f"{theirs} belongs to user {ANN}"
        folder.chmod(0o777)
        assert why_untrusted(mine, []) == f"every user may write to {folder}"


PLAN = """
backends: {w: {kind: function, call: "work.py:work"}}
tasks: [{id: a, prompt: x}]
"""
WORK = """
from pathlib import Path

async def work(prompt):
    Path(__file__).with_name("called").touch()
    return "done"
"""


@contextmanager
def working(folder: Path, *words: str) -> Generator[Warm]:
    command = [*PLAIT, "worker", "--store", str(STORE), *words]
    process = Warm(command, cwd=folder, env=environment(), stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_about(member: Warm, run_id: str) -> str:
    """The first line of the worker about a run."""
    assert member.stderr is not None
    patience = threading.Timer(60, member.kill)
    patience.start()
    try:
        return next(line for line in member.stderr if run_id in line)
    finally:
        patience.cancel()


def submitted(folder: Path, name: str) -> tuple[str, Path]:
    """Return the id of a queued run, and the folder of its plan file."""
    plans = folder / name
    plans.mkdir()
    (plans / "plan.yaml").write_text(PLAN)
    (plans / "work.py").write_text(WORK)
    done = plait_here(folder, "run", f"{name}/plan.yaml", "--queue", "--store", str(STORE))
    assert done.code == 0, done.err
    return done.out.strip(), plans


def status(folder: Path, run_id: str) -> str:
    async def read() -> str:
        async with SQLiteStore(folder / STORE, mode="read") as store:
            run = await store.get_run(run_id)
            assert run is not None
            return run.status

    return anyio.run(read)


@as_root
@pytest.mark.parametrize("what", ["the plan", "the function", "the folder"])
def test_a_worker_runs_nothing_of_another_user_unless_the_folder_is_named_to_it(tmp_path: Path, what: str) -> None:
    theirs, plans = submitted(tmp_path, "theirs")
    mine, _ = submitted(tmp_path, "mine")
    part = {"the plan": plans / "plan.yaml", "the function": plans / "work.py", "the folder": plans}[what]
    os.chown(part, ANN, -1)
    with working(tmp_path) as member:
        until(lambda: status(tmp_path, mine) == "completed")
        line = line_about(member, theirs)
    assert f"belongs to user {ANN}; trust the folder with --plans {plans.resolve()}" in line
    assert status(tmp_path, theirs) == "queued"
    assert not (plans / "called").exists()
    with working(tmp_path, "--plans", "mine", "--plans", "theirs"):
        until(lambda: status(tmp_path, theirs) == "completed")
    assert (plans / "called").exists()


@as_root
@pytest.mark.parametrize("named", ["a link to their plan", "their folder beside my plan"])
def test_what_the_database_names_is_what_is_examined(tmp_path: Path, named: str) -> None:
    mine, plans = submitted(tmp_path, "mine")
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "work.py").write_text(WORK)
    (evil / "plan.yaml").write_text(PLAN)
    (plans / "link.yaml").symlink_to(evil / "plan.yaml")
    is_link = named == "a link to their plan"
    stored = replace(
        backend_set_of_file(plans / "plan.yaml", BackendOptions()),
        plan=plans / ("link.yaml" if is_link else "plan.yaml"),
        folder=plans if is_link else evil,
    )

    async def store_run() -> str:
        async with SQLiteStore(tmp_path / STORE) as store:
            runs = Runs(stored.options(stored.unopened(["w"]), store=store, concurrency=1))
            return await runs.create(DAG([Task("a", "x")]), settings=stored.settings())

    theirs = anyio.run(store_run)
    os.chown(evil, ANN, -1)
    with working(tmp_path) as member:
        until(lambda: status(tmp_path, mine) == "completed")
        line = line_about(member, theirs)
    assert f"because {evil} belongs to user {ANN}" in line
    assert not (evil / "called").exists()


@pytest.mark.parametrize("plans", [None, ()])
async def test_a_plan_with_many_commands_is_read_as_often_as_one_with_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: tuple[Path, ...] | None
) -> None:
    reads: list[Path] = []

    def read(path: Path) -> dict[Path, dict[str, Any]]:
        reads.append(path)
        return called_plan_data(path)

    monkeypatch.setattr(run_backends, "called_plan_data", read)
    counts: list[int] = []
    for tasks in (1, 20):
        path = tmp_path / f"{tasks}.yaml"
        path.write_text("tasks:\n" + "".join(f"  - {{id: t{n}, run: [echo, x{n}]}}\n" for n in range(tasks)))
        plan, store = Plan.load(path), MemoryStore()
        run_id = await queue_run(plan, backend_set_of_plan(plan, BackendOptions()), store, None)
        run = await stored_run(store, run_id)
        files = FileOptions(plans=None if plans is None else (path.parent,))
        run_backends.StoredBackends.of(run.record, files).require_commands(run.state.dag)
        counts.append(len(reads))
        reads.clear()
    assert counts[0] == counts[1]


async def test_a_command_runs_that_only_the_file_of_a_person_allows(tmp_path: Path) -> None:
    path, named, store = tmp_path / "plan.yaml", tmp_path / "mine.yaml", MemoryStore()
    path.write_text("tasks: [{id: a, run: [echo, x]}]")
    plan = Plan.load(path)
    run = await stored_run(store, await queue_run(plan, backend_set_of_plan(plan, BackendOptions()), store, None))
    path.write_text("tasks: [{id: a, run: [echo, y]}]")
    named.write_text("backends: {command: {kind: command, allows: [[echo]]}}")
    with pytest.raises(InvalidRequest, match=r"allow it .* in a file named with --backends FILE"):
        run_backends.StoredBackends.of(run.record, FileOptions()).require_commands(run.state.dag)
    run_backends.StoredBackends.of(run.record, FileOptions(backends=named)).require_commands(run.state.dag)
