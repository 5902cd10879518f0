"""How the file of a store is made, checked and opened; `sqlite/` has the tests of what becomes of its runs."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plait import failpoints
from plait.errors import StoreUnusable
from plait.persistence import SQLiteStore, sqlite_file
from plait.persistence.sqlite_file import (
    APPLICATION_ID,
    error_code,
    find_damage,
    open_database,
    open_memory,
    repair_advice,
    transaction,
    unfinished_files,
    wal_path,
    wal_size,
)
from plait.persistence.tables import FORMAT, schema
from tests.contracts.store.samples import OPENING, Writer


def value(connection: sqlite3.Connection, pragma: str) -> object:
    return connection.execute(f"PRAGMA {pragma}").fetchone()[0]


def test_a_new_file_is_made_apart_and_gets_its_name_when_it_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: dict[str, tuple[bool, int]] = {}

    def look(name: str) -> None:
        there[name] = path.exists(), len(unfinished_files(path))

    monkeypatch.setattr(failpoints, "on_reach", look)
    with closing(open_database(path, "create")) as connection:
        assert list(there) == ["schema.before_commit", "file.before_link", "file.after_link"]
        assert [exists for exists, _ in there.values()] == [False, False, True]
        assert all(unfinished > 0 for _, unfinished in there.values())
        assert unfinished_files(path) == []
        assert value(connection, "application_id") == APPLICATION_ID
        assert value(connection, "user_version") == FORMAT
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


SETTINGS = {
    "journal_mode": "wal",
    "page_size": 8192,
    "synchronous": 2,
    "trusted_schema": 0,
    "cell_size_check": 1,
    "mmap_size": 0,
    "cache_size": -32768,
    "wal_autocheckpoint": 1000,
    "journal_size_limit": 67108864,
    "busy_timeout": 5000,
}


@pytest.mark.parametrize("mode", ["create", "existing"])
def test_every_connection_that_writes_has_the_same_settings(path: Path, mode: sqlite_file.Mode) -> None:
    open_database(path, "create").close()
    with closing(open_database(path, mode)) as connection:
        assert {name: value(connection, name) for name in SETTINGS} == SETTINGS


def test_a_connection_that_only_reads_writes_nothing(path: Path) -> None:
    open_database(path, "create").close()
    with closing(open_database(path, "read")) as connection:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("CREATE TABLE mine (x)")
        assert connection.isolation_level is None


def test_another_process_may_be_faster_in_making_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_faster(name: str) -> None:
        if name == "file.before_link":
            monkeypatch.setattr(failpoints, "on_reach", None)
            with closing(open_database(path, "create")) as other:
                other.execute("INSERT INTO texts VALUES (x'00', 'first')")

    monkeypatch.setattr(failpoints, "on_reach", be_faster)
    with closing(open_database(path, "create")) as connection:
        assert connection.execute("SELECT content FROM texts").fetchall() == [("first",)]
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_files_that_were_never_finished_are_removed_after_an_hour(path: Path) -> None:
    open_database(path, "create").close()
    names = [f".{path.name}.{number:016x}.new{end}" for number, end in enumerate(("", "-journal", "-wal", "-shm"))]
    others = [f".{path.name}.{0:016x}.newer", f".{path.name}.xyz.new", f"x.{path.name}.{0:016x}.new"]
    for name in (*names, *others):
        path.with_name(name).touch()
    assert [one.name for one in unfinished_files(path)] == names
    for name in (*names[:3], *others):
        os.utime(path.with_name(name), (0, time.time() - 3700))
    os.utime(path.with_name(names[3]), (0, time.time() - 3500))
    open_database(path, "read").close()
    assert [one.name for one in unfinished_files(path)] == names
    open_database(path, "existing").close()
    assert [one.name for one in unfinished_files(path)] == names[3:]
    assert {one.name for one in path.parent.iterdir()} >= set(others)


def test_git_ignores_the_folders_that_plait_makes_for_itself(tmp_path: Path) -> None:
    for name, ignored in ((".plait", True), ("mine", False)):
        open_database(tmp_path / "new" / name / "runs.db", "create").close()
        assert (tmp_path / "new" / name / ".gitignore").exists() is ignored
    made = tmp_path / "new" / ".plait" / ".gitignore"
    assert (made.read_bytes(), stat.S_IMODE(made.stat().st_mode)) == (b"*\n", 0o600)
    there = tmp_path / "there" / ".plait"
    there.mkdir(parents=True)
    open_database(there / "runs.db", "create").close()
    assert not (there / ".gitignore").exists()


REFUSED = {
    "missing": (lambda path: path.unlink(), "does not exist; check the path, or run something first"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a file; name a database file inside it instead"),
    "empty": (lambda path: os.truncate(path, 0), "is empty, so it is not a store; remove it, or choose another path"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_database_is_refused_with_what_to_do(path: Path, kind: str) -> None:
    open_database(path, "create").close()
    spoil, said = REFUSED[kind]
    spoil(path)
    with pytest.raises(StoreUnusable) as refused:
        open_database(path, "existing")
    assert str(refused.value) == f"{path} {said}"


def test_a_foreign_database_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(StoreUnusable) as refused:
        open_database(path, "create")
    assert str(refused.value) == f"{path} belongs to another program; choose another path"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    with pytest.raises(StoreUnusable, match="belongs to another program"):
        open_database(path, "create")  # without a format


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            5,
            f"was made by a development version of plait (database format 5); this plait reads format {FORMAT} only. "
            "Start a new file, e.g. --store NEW.db",
        ),
        (
            FORMAT + 1,
            f"was made by a newer plait (database format {FORMAT + 1}); this plait reads format {FORMAT} only. "
            "Upgrade plait",
        ),
    ],
)
def test_another_format_is_refused(path: Path, number: int, said: str) -> None:
    open_database(path, "create").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {number}")
    with pytest.raises(StoreUnusable) as refused:
        open_database(path, "existing")
    assert str(refused.value) == f"{path} {said}"


class WithoutSharedMemory(sqlite3.Connection):
    """A database on a file system that cannot have a WAL."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return super().execute("SELECT 'delete'" if statement == "PRAGMA journal_mode = WAL" else statement, *values)


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_system_without_shared_memory_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        open_database(path, "create").close()
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=WithoutSharedMemory))
    with pytest.raises(StoreUnusable) as refused:
        open_database(path, "create")
    said = "is on a file system without shared memory (WAL); put the store on a local disk"
    assert str(refused.value) == f"{path} {said}"
    assert path.exists() is exists
    assert unfinished_files(path) == []


def test_no_transaction_begins_by_itself(path: Path) -> None:
    for opened in (open_memory(), open_database(path, "create")):
        with closing(opened) as connection:
            connection.execute("INSERT INTO texts VALUES (x'00', 'kept')")
            assert not connection.in_transaction


def test_a_locked_database_is_told_from_one_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.01)
    with closing(open_database(path, "create")) as connection:
        assert value(connection, "busy_timeout") == 10
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnusable, match=r"another process has locked it; try again$"):
            open_database(path, "existing")


def test_an_old_library_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 9))
    with pytest.raises(StoreUnusable, match=r"is too old for .*: 3\.37 or later is needed$"):
        open_database(path, "create")
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 37, 0))
    open_database(path, "create").close()


def test_a_table_that_was_changed_is_damage_and_a_comment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "schema", lambda words: re.sub(r"--[^\n]*", "", schema(words)))
        connection = open_memory()
    with closing(connection):
        assert find_damage(connection) == ""
        connection.execute("DROP TABLE notes")
        connection.execute("DROP TABLE events")
        assert find_damage(connection) == "the definition of events, notes has changed"


class Judged:
    """A database on whose pages SQLite has a verdict."""

    def __init__(self, connection: sqlite3.Connection, verdict: str) -> None:
        self._connection, self._verdict = connection, verdict

    def execute(self, statement: str) -> sqlite3.Cursor:
        if statement == "PRAGMA integrity_check(1)":
            return self._connection.execute("SELECT ?", (self._verdict,))
        return self._connection.execute(statement)


@pytest.mark.parametrize(
    ("verdict", "found"), [("ok", ""), ("  *** in main ***\npage 7 is torn\n", "*** in main ***; page 7 is torn")]
)
def test_the_verdict_on_the_pages_is_told_in_one_line(verdict: str, found: str) -> None:
    with closing(open_memory()) as connection:
        assert find_damage(Judged(connection, verdict)) == found  # type: ignore[arg-type]  # pyright: ignore


@pytest.mark.parametrize("code", [sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR])
@pytest.mark.parametrize("may_write", [False, True])
def test_where_no_lock_can_be_made_a_file_without_a_log_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, may_write: bool
) -> None:
    open_database(path, "create").close()
    connect = sqlite3.connect

    def refuse_locks(address: str, **options: Any) -> sqlite3.Connection:
        if address.endswith("?mode=ro"):
            error = sqlite3.OperationalError("no lock")
            error.sqlite_errorcode = code
            raise error
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse_locks)
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    if code == sqlite3.SQLITE_IOERR or may_write:
        with pytest.raises(StoreUnusable, match=r"cannot be opened: no lock; check its permissions and the disk$"):
            open_database(path, "read")
        return
    with closing(open_database(path, "read")) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (0,)
    wal_path(path).write_bytes(b"log")
    with pytest.raises(StoreUnusable, match="cannot be opened: no lock"):
        open_database(path, "read")


def test_damage_that_sqlite_quotes_as_bytes_is_told(path: Path) -> None:
    open_database(path, "create").close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE runs", b"CREATE \xffABLE runs"))
    with pytest.raises(StoreUnusable) as refused:
        open_database(path, "existing")
    assert str(refused.value) == (
        f"{path} is not a database or is damaged (bytes that are no text where text has to be); restore a copy, or "
        "choose another path"
    )


def test_damage_is_looked_for_where_it_is_asked(path: Path) -> None:
    open_database(path, "create").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE notes")
    for mode in ("existing", "read"):
        with pytest.raises(StoreUnusable) as refused:
            open_database(path, mode)
        assert str(refused.value) == (
            f"{path} is not a database or is damaged (the definition of notes has changed); restore a copy, or choose "
            "another path"
        )
        open_database(path, mode, look_for_damage=False).close()


def test_a_large_file_that_is_only_read_is_opened_without_a_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_database(path, "create").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE notes")
    size = path.stat().st_size
    monkeypatch.setattr(sqlite_file, "_SMALL", size)
    with pytest.raises(StoreUnusable):
        open_database(path, "read")
    monkeypatch.setattr(sqlite_file, "_SMALL", size - 1)
    open_database(path, "read").close()
    with pytest.raises(StoreUnusable):
        open_database(path, "existing")


async def test_the_log_lies_beside_the_file_that_a_link_names(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    async with SQLiteStore(path) as store:
        link.symlink_to(path)
        await Writer(store).write(*OPENING)
        assert wal_path(link) == path.with_name(f"{path.name}-wal")
        assert wal_size(link) == wal_size(path) == wal_path(path).stat().st_size > 0
        log = f"{path.name}-wal and {path.name}-shm"
        assert repair_advice(path) == f"end its users, remove {log}, and restore a copy"
    assert wal_size(path) == 0
    assert repair_advice(path) == "restore a copy"


def fail(connection: sqlite3.Connection, last: str) -> None:
    with transaction(connection, "BEGIN"):
        connection.execute("INSERT INTO texts VALUES (x'01', 'lost')")
        for statement in last.split("; "):
            connection.execute(statement)


def test_a_transaction_is_whole_or_not_there() -> None:
    with closing(open_memory()) as connection:
        with transaction(connection):
            assert connection.in_transaction
            connection.execute("INSERT INTO texts VALUES (x'00', 'kept')")
        for last in ("SELECT nothing", "ROLLBACK; nothing"):  # SQLite may have rolled back by itself
            with pytest.raises(sqlite3.OperationalError, match="nothing"):
                fail(connection, last)
            assert not connection.in_transaction
        assert connection.execute("SELECT content FROM texts").fetchall() == [("kept",)]


def test_the_code_of_an_error_is_the_primary_code() -> None:
    error = sqlite3.OperationalError("disk I/O error")
    assert error_code(error) == error_code(ValueError()) == sqlite3.SQLITE_OK
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR | (15 << 8)
    assert error_code(error) == sqlite3.SQLITE_IOERR
