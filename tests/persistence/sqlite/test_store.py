"""What only the SQLite store promises: its file, its refusals, and what survives what."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task, failpoints
from plait.errors import StoreError, StoreNotOpen, StoreUnusable
from plait.events import RunClaimed
from plait.persistence import SQLiteStore
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    CLAIMED,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
    owner,
    whole,
)
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.database import edit, make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent.parent.parent


# The file.


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
async def test_nobody_else_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs" / "plait.db"
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING)
        await store.purge([])
        modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()}
        assert modes == {"plait.db": 0o600, "plait.db-wal": 0o600, "plait.db-shm": 0o600}
        assert [stat.S_IMODE(f.stat().st_mode) for f in (path.parent, path.parent.parent)] == [0o700, 0o700]
    assert [entry.name for entry in path.parent.iterdir()] == ["plait.db"]


@pytest.mark.parametrize("mode", ["create", "existing"])
async def test_what_was_written_is_there_after_opening_again(path: Path, mode: str) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        before = await whole(store)
    async with SQLiteStore(str(path), mode=mode) as store:
        assert await whole(store) == before
        await store.write(Writer(store).batch(*OPENING, START_A))
        assert await whole(store) == before


async def test_a_store_opened_and_closed_twice(path: Path) -> None:
    store = SQLiteStore(path)
    with pytest.raises(StoreNotOpen, match="not open"):
        await store.list_runs()
    async with store:
        with pytest.raises(StoreError, match="open already"):
            async with store:
                pass
        await Writer(store).write(*OPENING)
    await store.close()
    with pytest.raises(StoreNotOpen, match="not open"):
        await store.write(Writer(store).batch(*OPENING))
    async with store:
        assert len(await store.list_runs()) == 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("exists", [False, True])
async def test_no_run_begins_with_a_store_that_nobody_has_opened(path: Path, strict: bool, exists: bool) -> None:
    talker = Talker()
    if exists:
        await make(path)
    with pytest.raises(StoreNotOpen, match="is not open; use it inside `async with`"):
        await ParallelRunner(talker, store=SQLiteStore(path), strict=strict).run(DAG([Task("a", "a")]))
    assert talker.prompts == []


async def test_no_run_begins_with_a_store_that_is_only_read_from(path: Path) -> None:
    talker = Talker()
    await make(path)
    async with SQLiteStore(path, mode="read") as store:
        with pytest.raises(StoreNotOpen, match="for reading only; open it with mode 'existing'"):
            await ParallelRunner(talker, store=store).run(DAG([Task("a", "a")]))
    assert talker.prompts == []


async def test_a_store_that_is_closed_under_a_run_does_not_end_it(path: Path) -> None:
    store = SQLiteStore(path)

    async def closes(prompt: str) -> str:
        await store.close()
        return prompt

    async with store:
        result = await ParallelRunner(closes, store=store, clock=QuickClock()).run(DAG([Task("a", "x")]))
    assert (result.status, result["a"].text) == (RunStatus.COMPLETED, "x")
    assert "is not open" in result.degraded[0].error


@pytest.mark.parametrize("bad", ["", ":memory:"])
def test_a_path_that_is_none(bad: str) -> None:
    with pytest.raises(ValueError, match="path of a file"):
        SQLiteStore(bad)


async def test_the_file_taken_away_is_noticed(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(StoreError, match="removed or replaced"):
            await writer.write(START_A)
        path.with_name("elsewhere").rename(path)
        await writer.write(START_A)
        os.truncate(path, 0)
        with pytest.raises(StoreError, match="or emptied"):
            await writer.write(DONE_A)


# Refusals.


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 100])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "text": (lambda path: path.write_text("not a database\n" * 500), "not a database"),
    "zeros": (lambda path: path.write_bytes(bytes(50_000)), "not a database"),
    "a header alone": (lambda path: path.write_bytes(path.read_bytes()[:100]), "not a database"),
    "truncated": (truncated, "damaged"),
    "foreign": (lambda path: edit(path, "PRAGMA application_id = 7"), "another program"),
    "not ours": (lambda path: edit(path, "PRAGMA application_id = 0", "PRAGMA user_version = 0"), "another program"),
    "newer": (lambda path: edit(path, "PRAGMA user_version = 999"), "newer plait .*format 999.*Upgrade"),
}


# Reading does not check every page before it starts.
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (kind, mode)
        for kind in REFUSED
        for mode in ("create", "existing", "read")
        if (kind, mode) != ("truncated", "read")
    ],
)
async def test_a_bad_file_is_refused_and_left_as_it_is(path: Path, kind: str, mode: str) -> None:
    await make(path)
    spoil, reason = REFUSED[kind]
    spoil(path)
    before = {entry.name: entry.read_bytes() for entry in path.parent.iterdir()}
    touched = path.stat()
    with pytest.raises(StoreUnusable, match=reason) as refused:
        async with SQLiteStore(path, mode=mode):
            pass
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before[path.name]
    found = path.stat()
    assert (found.st_mtime_ns, found.st_mode, found.st_ino) == (touched.st_mtime_ns, touched.st_mode, touched.st_ino)
    assert {entry.name for entry in path.parent.iterdir()} - set(before) <= {f"{path.name}-wal", f"{path.name}-shm"}


@pytest.mark.parametrize("mode", ["existing", "read"])
async def test_a_missing_file_is_not_made(path: Path, mode: str) -> None:
    with pytest.raises(StoreUnusable, match="does not exist"):
        async with SQLiteStore(path, mode=mode):
            pass
    assert not path.parent.exists()


async def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path, tmp_path / "file" / "runs.db", Path("/proc/nowhere/runs.db"), tmp_path / ("x" * 300)):
        with pytest.raises(StoreUnusable, match=str(bad)[:20]) as refused:
            async with SQLiteStore(bad):
                pass
        assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


async def test_a_write_protected_file_is_refused_for_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await make(path)
    path.chmod(0o400)
    if os.geteuid() == 0:  # root may write everything
        monkeypatch.setattr(os, "access", lambda _place, how: how != os.W_OK)
    with pytest.raises(StoreUnusable, match="may not be written"):
        async with SQLiteStore(path):
            pass
    async with SQLiteStore(path, mode="read") as store:
        assert len(await store.list_runs()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
@pytest.mark.parametrize("left", ["nothing", "an empty log"])
async def test_a_store_is_read_where_nothing_may_be_written(path: Path, left: str) -> None:
    await make(path)
    if left == "an empty log":
        path.with_name(f"{path.name}-wal").touch()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(StoreUnusable, match="may not be written"):
            async with SQLiteStore(path):
                pass
        async with SQLiteStore(path, mode="read") as store:
            assert len(await store.list_runs()) == 1
    finally:
        path.parent.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
async def test_a_log_that_may_not_be_read_is_never_left_out(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING)
        kept = path.parent.parent / "kept"
        kept.mkdir()
        for name in (path.name, f"{path.name}-wal"):
            shutil.copy(path.with_name(name), kept / name)
    kept.chmod(0o500)
    try:
        with pytest.raises(StoreUnusable, match="cannot be opened"):
            async with SQLiteStore(kept / path.name, mode="read"):
                pass
    finally:
        kept.chmod(0o700)


# Readers and other writers.


async def test_reading_while_another_connection_writes(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        async with SQLiteStore(path, mode="read") as reader:
            await writer.write(START_A, ASK)
            assert (await reader.list_tasks(RUN))[0].status == "running"
            await writer.write(ANSWER, DONE_A)
            assert await whole(reader) == await whole(store)
            with pytest.raises(StoreError, match="for reading only"):
                await reader.write(writer.batch(CLAIMED))
        # A reader that leaves must not take the live log with it.
        await writer.write(RunClaimed(at(9), owner("next"), 1.0))
    async with SQLiteStore(path, mode="read") as reader:
        run = await reader.get_run(RUN)
        assert run is not None
        assert run.epoch == 2


async def test_a_write_passes_the_failpoints_on_both_sides_of_its_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    async with SQLiteStore(path) as store:
        monkeypatch.setattr(failpoints, "on_reach", passed.append)
        await Writer(store).write(*OPENING)
    assert passed == ["txn.begun", "txn.before_commit", "txn.after_commit"]
