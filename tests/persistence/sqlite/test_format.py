"""A database file of another format: refused in one line, by the library and by the command, and left as it is."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from plait.errors import StoreUnusable
from plait.persistence import SQLiteStore
from plait.persistence.sqlite_file import APPLICATION_ID
from plait.persistence.tables import FORMAT
from tests.support.plans.logged import CHAIN, make
from tests.support.processes.command import plait_here

DEVELOPMENT = (1, 5, 100, 103)
NEWER = FORMAT + 1
MODES = pytest.mark.parametrize("mode", ["create", "existing", "read"])
COMMANDS = (
    ("run", "plan.yaml"),
    ("resume",),
    ("resume", "last", "--dry-run"),
    ("runs",),
    ("show", "last"),
    ("log", "last"),
    ("answer",),
    ("cancel", "last"),
    ("gc", "--keep", "1"),
    ("serve", "--backends", "plan.yaml", "--port", "0"),
)


def refusal(path: Path | str, number: int) -> str:
    """The whole message about a file at `path` of the format `number`."""
    if number > FORMAT:
        return (
            f"{path} was made by a newer plait (database format {number}); this plait reads format {FORMAT} "
            "only. Upgrade plait"
        )
    return (
        f"{path} was made by a development version of plait (database format {number}); this plait reads format "
        f"{FORMAT} only. Start a new file, e.g. --store NEW.db"
    )


@contextmanager
def another_format(path: Path, number: int) -> Generator[sqlite3.Connection]:
    """Make a database of the format `number`, with a table that no plait of today knows. While the connection is open,
    the row is in the log beside the file; closing the connection brings it into the file.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("CREATE TABLE tasks (task_id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID")
        connection.execute("INSERT INTO tasks VALUES ('a')")
        path.chmod(0o600)
        yield connection


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of the file and of its log. The index (`-shm`) holds the locks of readers, so it is left out."""
    files = (path, path.with_name(f"{path.name}-wal"))
    return {one.name: one.read_bytes() for one in files if one.exists() and one.stat().st_size}


@MODES
@pytest.mark.parametrize("number", [*DEVELOPMENT, NEWER])
async def test_a_file_of_another_format_is_refused_and_left_as_it_is(path: Path, number: int, mode: str) -> None:
    with another_format(path, number):
        pass
    before, touched = contents(path), path.stat()
    with pytest.raises(StoreUnusable) as refused:
        async with SQLiteStore(path, mode=mode):  # type: ignore[arg-type]
            pass
    assert str(refused.value) == refusal(path, number)
    assert contents(path) == before
    assert path.stat().st_mtime_ns == touched.st_mtime_ns


@MODES
async def test_the_log_of_another_format_stays_where_it_is(path: Path, mode: str) -> None:
    with another_format(path, 4):
        before = contents(path)
        assert len(before) == 2
        with pytest.raises(StoreUnusable, match="database format 4"):
            async with SQLiteStore(path, mode=mode):  # type: ignore[arg-type]
                pass
        assert contents(path) == before


@pytest.mark.parametrize("number", [*DEVELOPMENT, NEWER])
def test_doctor_says_what_a_file_of_another_format_is(tmp_path: Path, number: int) -> None:
    path = tmp_path / "kept" / "old.db"
    with another_format(path, number):
        pass
    before = contents(path)
    done = plait_here(tmp_path, "doctor", "--store", str(path), "--json")
    assert (done.code, done.err) == (3, "")
    [found] = [one for one in done.value["checks"] if one["verdict"] == "bad"]
    assert (found["check"], found["found"]) == ("file", refusal(path, number))
    assert contents(path) == before


@pytest.mark.parametrize(
    ("number", "words"), [*((NEWER, words) for words in COMMANDS), *((number, COMMANDS[0]) for number in DEVELOPMENT)]
)
def test_every_command_refuses_it_in_one_line(tmp_path: Path, number: int, words: tuple[str, ...]) -> None:
    make(tmp_path, CHAIN)
    path = tmp_path / "old.db"
    with another_format(path, number):
        pass
    before = contents(path)
    done = plait_here(tmp_path, *words, "--store", "old.db")
    shown = done.err.replace(str(path), "old.db")
    assert (done.code, done.out, shown) == (3, "", f"plait: {refusal('old.db', number)}\n")
    assert contents(path) == before
    assert not (tmp_path / "log").exists(), "a task was run"


def test_a_new_file_has_the_one_format(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q", "--store", "new.db").code == 0
    with closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT,)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    found = plait_here(tmp_path, "doctor", "--store", "new.db", "--json").value["checks"]
    assert [(one["verdict"], one["found"]) for one in found if one["check"] == "schema"] == [("ok", f"format {FORMAT}")]
