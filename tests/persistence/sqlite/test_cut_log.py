"""A write-ahead log that another program cuts while the store is open, and one that SQLite itself shortens."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from plait.persistence import Note, SQLiteStore, StoreBusy, StoreError, failpoints
from plait.persistence.contract.samples import (
    ANSWER,
    ASK,
    DONE_A,
    OPENING,
    START_A,
    Writer,
    at,
)
from plait.persistence.sqlite.wal import LogWatch
from tests.support.stores.database import in_child

FRAME_BYTES = 24 + 8192
WRITES = ("CREATE TABLE visited (at TEXT)", "DROP TABLE visited")
NOTE = Note("cancel", at(5))


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def cut(path: Path, size: int) -> None:
    """Cut the log, in another process."""
    subprocess.run(["truncate", "-s", str(size), str(log_of(path))], check=True)


def copy(source: Path, target: Path) -> None:
    """Copy a file, in another process: closing the database's file in this one would drop SQLite's locks on it."""
    subprocess.run(["cp", str(source), str(target)], check=True)


def another(path: Path) -> sqlite3.Connection:
    """A connection as of another program. SQLite keeps the locks of connections of one process apart."""
    return sqlite3.connect(path, isolation_level=None)


async def stored_seq(path: Path) -> int:
    """The last change in a copy of the file and of its log, as after a crash: 0 without a run."""
    of_crash = path.with_name("copy.db")
    copy(path, of_crash)
    copy(log_of(path), log_of(of_crash))
    async with SQLiteStore(of_crash, mode="existing") as store:
        runs = await store.list_runs()
        return runs[0].last_seq if runs else 0


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.9, 0.9999])
async def test_a_cut_log_is_noticed_before_the_next_write(path: Path, part: float) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        await writer.write(START_A)
        cut(path, int(log_of(path).stat().st_size * part))
        for _ in range(2):
            with pytest.raises(StoreError, match=r"^another program has cut .*-wal from .* then resume the run$"):
                await writer.write(ASK)
        with pytest.raises(StoreError, match="has cut"):
            await store.send("run-1", NOTE)
        with pytest.raises(StoreError, match="has cut"):
            await store.purge([])
    async with SQLiteStore(path, mode="existing") as store:  # its pages are checked
        runs = await store.list_runs()
        assert not runs or runs[0].last_seq in {3, 4}
        if not runs:  # an earlier end of the log is an earlier state, from which all goes on
            writer = Writer(store)
            await writer.write(*OPENING)
            assert len(await store.list_tasks("run-1")) == 3


def test_no_part_of_a_transaction_is_left_by_a_cut_log(tmp_path: Path) -> None:
    """Closing the last connection moves the log into the file, but not a log without its end."""
    path = tmp_path / "rows.db"
    with closing(another(path)) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE words (id INTEGER PRIMARY KEY, word TEXT)")
        connection.execute("CREATE INDEX words_by_word ON words (word)")
        connection.executemany("INSERT INTO words (word) VALUES (?)", [(long_word(row),) for row in range(100)])
    copy(path, tmp_path / "whole.db")
    for frames in range(1, 80, 8):
        copy(tmp_path / "whole.db", path)
        connection = another(path)
        log = LogWatch(path)
        for number in range(20):  # in place, so that the first page of the file stays the same
            connection.execute("BEGIN IMMEDIATE")
            for row in range(5):
                word = long_word(1000 + 5 * number + row)
                connection.execute("UPDATE words SET word = ? WHERE id = ?", (word, (5 * number + 17 * row) % 100 + 1))
            connection.execute("COMMIT")
        log.note_write()
        cut(path, log_of(path).stat().st_size - frames * FRAME_BYTES + 100)
        with pytest.raises(StoreError, match="has cut"):
            log.check(connection)
        connection.close()
        log.close()
        with closing(another(path)) as later:
            assert later.execute("PRAGMA integrity_check").fetchall() == [("ok",)], frames


def long_word(number: int) -> str:
    """A word of 3,000 letters that begins unlike those of other numbers."""
    return hashlib.sha256(str(number).encode()).hexdigest() * 47


async def test_a_log_that_is_cut_while_a_batch_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)

        def reach(name: str) -> None:
            if name == "txn.before_commit":
                cut(path, 0)

        monkeypatch.setattr(failpoints, "on_reach", reach)
        with pytest.raises(StoreError, match="has cut"):
            await writer.write(START_A)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="has cut"):
            await writer.write(START_A)


async def test_a_log_that_is_cut_between_a_write_and_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)

        def reach(name: str) -> None:
            if name == "txn.after_commit":
                cut(path, 0)

        monkeypatch.setattr(failpoints, "on_reach", reach)
        await writer.write(START_A)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="has cut"):
            await writer.write(ASK)
        assert log_of(path).stat().st_size == 0  # nothing was written behind a hole


async def test_an_emptied_log_whose_contents_are_in_the_file_costs_nothing(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        with closing(another(path)) as visitor:
            visitor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        cut(path, 0)
        await writer.write(START_A)
        assert await stored_seq(path) == 4


async def test_an_emptied_log_under_a_reader_is_waited_for(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        with closing(another(path)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM runs").fetchone() == (1,)
            reader_sees = reader.execute("SELECT last_seq FROM runs").fetchone()
            with closing(another(path)) as visitor:
                visitor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            cut(path, 0)
            with pytest.raises(StoreBusy, match="nothing is lost"):
                await writer.write(START_A)
            assert reader_sees == (3,)
            reader.execute("COMMIT")
            await writer.write(START_A)
        assert await stored_seq(path) == 4


@pytest.mark.parametrize(
    "how",
    [
        ("PRAGMA wal_checkpoint(TRUNCATE)",),
        ("PRAGMA wal_checkpoint(TRUNCATE)", *WRITES),
        ("PRAGMA journal_size_limit = 0", "PRAGMA wal_checkpoint(RESTART)", *WRITES),
        ("PRAGMA wal_checkpoint(RESTART)", *WRITES),
    ],
)
async def test_a_log_that_sqlite_shortens_is_not_cut(path: Path, how: tuple[str, ...]) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING, START_A)
        for number, change in enumerate((ASK, ANSWER, DONE_A), 5):
            before = log_of(path).stat().st_size
            with closing(another(path)) as visitor:
                for statement in how:
                    visitor.execute(statement).fetchall()
            if number == 5 and how[0] != "PRAGMA wal_checkpoint(RESTART)":
                assert log_of(path).stat().st_size < before
            await writer.write(change)
            assert await stored_seq(path) == number


EMPTY_THE_LOG = """
import asyncio, sqlite3, sys
from contextlib import closing
from plait.persistence import Note, SQLiteStore

async def main(path, times):
    with closing(sqlite3.connect(path, isolation_level=None)) as visitor:
        await empty(visitor, path, times)

async def empty(visitor, path, times):
    async with SQLiteStore(path, mode="existing") as store:
        emptied = 0
        for number in range(times):
            await store.send("run-1", Note("n", "2026-11-21T23:00:00.000Z", None, "{}"))
            emptied += visitor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        print(emptied, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_two_processes_whose_logs_are_emptied_again_and_again(path: Path) -> None:
    async with SQLiteStore(path) as store:
        first = Writer(store)
        await first.write(*OPENING)
        child = in_child(EMPTY_THE_LOG, str(path), "200")
        runs = 0
        while child.poll() is None:
            runs += 1
            writer = Writer(store, f"more-{runs}")
            await writer.write(*OPENING)
            for change in (START_A, ASK, ANSWER, DONE_A):
                await writer.write(change)
        said, errors = child.communicate()
        assert (child.returncode, errors) == (0, "")
        assert int(said) > 100
        assert len(await store.list_notes("run-1")) == 200
        stored = await store.list_runs(100_000)
        assert [run.last_seq for run in stored if run.run_id != "run-1"] == [7] * runs


async def test_a_store_that_purges_goes_on(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        assert not (await store.purge([])).remains
        assert log_of(path).stat().st_size == 0
        await writer.write(START_A)
        cut(path, 0)
        with pytest.raises(StoreError, match="has cut"):
            await writer.write(ASK)
