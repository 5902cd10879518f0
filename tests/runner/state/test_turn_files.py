"""Files of turns: which stores have a place for them, what backends are told of it, and what `plait gc` leaves."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task
from plait.backends import Usage
from plait.backends.agents.cli_agent import Sessions
from plait.backends.backend_protocol import DetachedTurn, Files
from plait.errors import BackendError, ErrorKind
from plait.persistence import FilesStore, MemoryStore, SQLiteStore, Store
from plait.runner.state.attempt_files import attempt_files, delete_files, run_folder
from tests.support.fakes import QuickClock, Talker
from tests.support.plans.logged import make
from tests.support.processes.command import plait, plait_here
from tests.support.stores.database import edit
from tests.support.stores.faulty_store import FaultyStore

ROOT = Path(".plait") / "plait.db.files"


class Outliving(Talker):
    """A backend whose turns may outlive their runner: only such a one is given files."""

    def inspect(self, files: Files) -> DetachedTurn | None:
        return None


async def test_each_attempt_is_given_a_place_of_its_own_and_nothing_is_made_there(sqlite_store: SQLiteStore) -> None:
    root = sqlite_store.path.with_name(f"{sqlite_store.path.name}.files")
    assert isinstance(sqlite_store, FilesStore)
    assert sqlite_store.files_root == root
    busy = [BackendError(ErrorKind.OVERLOADED, "later")]
    backend = Outliving(lambda prompt, _: busy.pop() if busy else f"re: {prompt}")
    runner = ParallelRunner(backend, store=sqlite_store, clock=QuickClock())
    dag = DAG([Task("a", prompt="one", retry=Retry(attempts=2)), Task("b", prompt="two", continues="a")])
    assert (await runner.run(dag, "r")).status is RunStatus.COMPLETED
    record = await sqlite_store.get_run("r")
    assert record is not None
    for _ in range(2):
        await runner.runs.continue_task("r", "b", "and now?")
    later = await sqlite_store.get_run("r")
    assert later is not None
    expected = [("a", 1), ("a", 2), ("b", 1), ("b", f"0-{record.last_seq}")]
    files = [request.files for request in backend.requests]
    assert files[:4] == [attempt_files(root, "r", *ids) for ids in expected]
    assert len(set(files)) == 5
    plain = Talker()
    await ParallelRunner(plain, store=sqlite_store).run(dag)
    assert [request.files for request in plain.requests] == [None, None]
    assert not root.exists()


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_store_without_a_place_has_none(store: Store, wrapped: bool) -> None:
    if isinstance(store, SQLiteStore) and not wrapped:
        return
    backend = Outliving()
    await ParallelRunner(backend, store=FaultyStore(store) if wrapped else store).run(DAG([Task("a", prompt="one")]))
    await ParallelRunner(backend).run(DAG([Task("a", prompt="one")]))
    assert not isinstance(MemoryStore(), FilesStore)
    assert [request.files for request in backend.requests] == [None, None]


async def test_a_store_has_one_place_by_whatever_link_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    async with SQLiteStore(tmp_path / "data" / "runs.db"):
        pass
    (tmp_path / "folder").symlink_to("data")
    (tmp_path / "link.db").symlink_to(tmp_path / "folder" / "runs.db")
    for path in ("data/runs.db", "folder/runs.db", "link.db"):
        assert SQLiteStore(tmp_path / path).files_root == tmp_path / "data" / "runs.db.files"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two completed runs with files, the newer one first in `runs`."""
    make(tmp_path, "  - {id: a, prompt: one}\n")
    for _ in range(2):
        assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    for run_id in runs(tmp_path):
        filled(run_folder(tmp_path / ROOT, run_id))
    return tmp_path


def filled(folder: Path) -> Path:
    (folder / "a" / "1").mkdir(parents=True)
    (folder / "a" / "1" / "stdout").write_text("an answer")
    return folder


def runs(folder: Path) -> list[str]:
    return [run["run_id"] for run in plait_here(folder, "runs", "--json").value]


def test_the_files_of_deleted_runs_go_with_them(folder: Path) -> None:
    newer, older = (run_folder(folder / ROOT, run_id) for run_id in runs(folder))
    sessions = filled(folder / ROOT / "sessions")
    assert plait_here(folder, "gc", "--keep", "1", "--dry-run").code == 0
    assert older.exists()
    done = plait(folder, "gc", "--keep", "1")
    assert (done.code, done.err) == (0, "")
    assert sorted((folder / ROOT).iterdir()) == sorted([newer, sessions])
    assert (newer / "a" / "1" / "stdout").exists()


def test_what_is_kept_of_sessions_goes_with_the_last_run_that_had_them(folder: Path) -> None:
    newer, older = runs(folder)
    place = folder / ROOT / "sessions"
    for session_id, run_ids in {"gone": [older], "held": [older], "both": [older, newer], "fresh": [older]}.items():
        for run_id in run_ids:
            detail = f'{{"session_id":"{session_id}"}}'
            row = f"'{run_id}', (SELECT max(seq) + 1 FROM events), '', 'session_opened', 'a', 1, '{detail}'"
            edit(folder / ROOT.with_suffix(""), f"INSERT INTO events VALUES ({row})")
        Sessions(place, "codex").note_spent(session_id, Usage(1, 2))
        if session_id != "fresh":
            for one in place.iterdir():
                os.utime(one, (0, time.time() - 7200))
    (place / "notes.txt").write_text("of no session")

    async def delete() -> None:
        async with Sessions(place, "codex").writing("held", 0.0, print):
            for one in place.glob("*.lock"):
                os.utime(one, (0, time.time() - 7200))
            assert plait(folder, "gc", "--keep", "9").code == 0
            assert known() == {"gone", "held", "fresh", "both"}
            assert plait(folder, "gc", "--keep", "1").code == 0

    def known() -> set[str]:
        return {name for name in ("gone", "held", "fresh", "both") if Sessions(place, "codex").spent(name) is not None}

    anyio.run(delete)
    assert known() == {"held", "fresh", "both"}
    assert (place / "notes.txt").exists()


def test_no_link_is_followed_out_of_a_run(folder: Path) -> None:
    newer, older = (run_folder(folder / ROOT, run_id) for run_id in runs(folder))
    outside = filled(folder / "outside")
    (older / "a" / "link").symlink_to(outside)
    (older / "a" / "file").symlink_to(outside / "a" / "1" / "stdout")
    newer.rename(folder / "moved")
    newer.symlink_to(folder / "moved")
    assert plait_here(folder, "gc", "--keep", "0").code == 0
    assert not older.exists()
    assert not newer.is_symlink()
    assert (outside / "a" / "1" / "stdout").exists()
    assert (folder / "moved" / "a" / "1" / "stdout").exists()


def test_what_an_earlier_deletion_left_goes_once_nobody_can_be_at_work_there(folder: Path) -> None:
    fresh, old = filled(folder / ROOT / "fresh"), filled(folder / ROOT / "old")
    os.utime(old, (0, time.time() - 7200))
    assert plait_here(folder, "gc", "--keep", "9").code == 0
    assert fresh.exists()
    assert not old.exists()
    assert all(run_folder(folder / ROOT, run_id).exists() for run_id in runs(folder))


async def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file in its place")
    assert await delete_files(tmp_path / "root", ["r"], []) is None
    assert await delete_files(None, ["r"], []) is None
    (tmp_path / "root").unlink()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "r").write_text("a file in its place")
    said = await delete_files(tmp_path / "root", ["r"], [])
    assert said is not None
    assert said.startswith(f"not all files of deleted runs were removed below {tmp_path / 'root'}: [Errno 20]")
