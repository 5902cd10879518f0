"""The check of the log: every flipped bit that SQLite would ignore is found, and every usual log is whole."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore, StoreUnusable
from plait.persistence.contract.samples import ANSWER, ASK, CLAIMED, CREATED, DONE_A, RUNNING, START_A, Writer
from plait.persistence.findings import Fitness
from plait.persistence.sqlite import health
from plait.persistence.sqlite.wal_frames import DOUBT, LogState, state_of_log

FRAME = 8_192 + 24
BATCHES = ((CREATED, CLAIMED), (RUNNING,), (START_A,), (ASK, ANSWER), (DONE_A,))


async def crashed(folder: Path) -> Path:
    """A database with the log of a process that died."""
    path, copy = folder / "runs.db", folder / "crashed.db"
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        for batch in BATCHES:
            await writer.write(*batch)
        for end in ("", "-wal"):  # by another process: closing the file in this one would drop SQLite's locks on it
            subprocess.run(["cp", f"{path}{end}", f"{copy}{end}"], check=True)
    return copy


def log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def flipped(log: Path, offset: int, bit: int = 1) -> None:
    content = bytearray(log.read_bytes())
    content[offset] ^= bit
    log.write_bytes(content)


async def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    log, copy = log_of(await crashed(tmp_path)), tmp_path / "log"
    assert state_of_log(log) is LogState.WHOLE
    rng, size = random.Random(5), log.stat().st_size
    found: Counter[LogState] = Counter()
    for offset in [*range(32), *(32 + n for n in range(24)), *(rng.randrange(size) for _ in range(150))]:
        shutil.copy(log, copy)
        flipped(copy, offset, 1 << rng.randrange(8))
        found[state_of_log(copy)] += 1
    assert not found[LogState.WHOLE]
    assert found[LogState.DAMAGED] > found[LogState.IN_DOUBT] > 0


async def test_a_log_that_ends_anywhere_is_whole(tmp_path: Path) -> None:
    log, copy = log_of(await crashed(tmp_path)), tmp_path / "log"
    content = log.read_bytes()
    for size in [0, 31, 32, 56, *(32 + n * FRAME + more for n in range(3) for more in (-1, 0, 24, 5000))]:
        copy.write_bytes(content[: max(0, size)])
        assert state_of_log(copy) is LogState.WHOLE, size
    assert state_of_log(tmp_path / "missing") is LogState.WHOLE


def test_frames_of_an_earlier_generation_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE rows (text)")
        for _ in range(20):
            connection.execute("INSERT INTO rows VALUES (hex(randomblob(3000)))")
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("INSERT INTO rows VALUES ('the first of the next generation')")
        assert state_of_log(log_of(path)) is LogState.WHOLE


def test_frames_of_failed_commits_are_in_doubt_and_no_damage(tmp_path: Path) -> None:
    """Two commits failed at their sync, and a shorter one took their place: the rests do not continue each other."""
    logs: list[bytes] = []
    with closing(sqlite3.connect(tmp_path / "1.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE rows (text)")
        connection.execute("INSERT INTO rows VALUES ('first')")
        before = log_of(tmp_path / "1.db").read_bytes()
        for rows in (8, 4, 1):  # each is written where the one before was
            copy = tmp_path / f"copy-{rows}.db"
            shutil.copy(tmp_path / "1.db", copy)
            log_of(copy).write_bytes(before)
            with closing(sqlite3.connect(copy, isolation_level=None)) as other:
                other.execute("BEGIN")
                for _ in range(rows):
                    other.execute("INSERT INTO rows VALUES (hex(randomblob(3000)))")
                other.execute("COMMIT")
                logs.append(log_of(copy).read_bytes())
    longest, middle, shortest = logs
    log = tmp_path / "log"
    log.write_bytes(shortest + middle[len(shortest) :] + longest[len(middle) :])
    assert state_of_log(log) is LogState.IN_DOUBT


async def test_a_damaged_log_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = await crashed(tmp_path)
    flipped(log_of(path), 32 + 24 + 100)
    before = log_of(path).read_bytes()
    for mode in ("create", "existing", "read"):
        with pytest.raises(StoreUnusable, match=r"crashed.db-wal is damaged.*; restore a copy .* sqlite3 .*TRUNCATE"):
            async with SQLiteStore(path, mode=mode):
                pass
    assert log_of(path).read_bytes() == before
    assert [one.fitness for one in health.file(path) if one.check == "wal"] == [Fitness.BAD]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    async with SQLiteStore(path, mode="existing"):
        pass


async def test_a_last_change_that_does_not_fit_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = await crashed(tmp_path)
    flipped(log_of(path), log_of(path).stat().st_size - 100)
    with caplog.at_level(logging.WARNING):
        async with SQLiteStore(path, mode="read") as store:
            (run,) = await store.list_runs()
    assert run.counts == {"running": 1, "pending": 2}
    assert DOUBT in caplog.text
    assert [one.fitness for one in health.file(path) if DOUBT in one.found] == [Fitness.WARNING]


async def test_the_check_drops_no_lock_of_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    visit = f"import sqlite3; sqlite3.connect({str(path)!r}).execute('SELECT count(*) FROM runs').fetchone()"
    async with SQLiteStore(path) as store:
        await Writer(store).write(CREATED)
        assert state_of_log(log_of(path)) is LogState.WHOLE
        subprocess.run([sys.executable, "-c", visit], check=True)  # the last user of a file would remove its log
        assert log_of(path).stat().st_size > 0
