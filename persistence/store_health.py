"""Checks of the SQLite library and of a file for their fitness as a store, as findings for `plait doctor`.

Nothing is created or repaired, and only SQLite opens the file, for reading. SQLite leaves an empty WAL and the index of
the WAL beside the file, as after every read.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plait.errors import StoreUnusable
from plait.json_form import value
from plait.persistence import sql_store, tables
from plait.persistence.sqlite_file import (
    OLDEST_SQLITE,
    decode_lossy,
    find_damage,
    open_database,
    repair_advice,
    wal_size,
)
from plait.persistence.sqlite_store import read_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_NAMED: Final = 5
"""A finding names this number of things at most."""


class Verdict(StrEnum):
    """What a finding means: fit, fit with a reservation, or unfit."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@value
class Finding:
    """The result of one check."""

    check: str
    """The name of the check."""
    verdict: Verdict
    found: str
    """The observation."""
    advice: str = ""
    """The remedy; empty if nothing has to be done."""


_WAL_RESET_BUG: Final = (((3, 7, 0), (3, 44, 6)), ((3, 45, 0), (3, 50, 7)), ((3, 51, 0), (3, 51, 3)))
"""The versions with the bug, from each first version to before the second. Two connections that write and checkpoint
at the same moment may lose committed rows, or the whole file.
"""
_LARGE_WAL: Final = 64 << 20  # bytes; about 8 MiB is usual


def library(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> Finding:
    """Check that SQLite `version` is new enough, and has not the WAL-reset bug."""
    name = ".".join(map(str, version))
    if version < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE[:2]))
        return Finding("sqlite", Verdict.BAD, f"{name} is too old", f"use a Python with SQLite {oldest} or later")
    if any(first <= version < fixed for first, fixed in _WAL_RESET_BUG):
        return Finding(
            "sqlite",
            Verdict.WARNING,
            f"{name} has the WAL-reset bug: in rare cases two processes that write to one file lose committed data",
            "let one process at a time write to a store, or use a Python with SQLite 3.51.3, 3.50.7 or 3.44.6",
        )
    return Finding("sqlite", Verdict.OK, name)


def file(path: Path) -> Iterator[Finding]:
    """Check the pages and the checksums of the store at `path`. Stop at an error that makes the file unreadable."""
    try:
        connection = open_database(path, "read", look_for_damage=False)
    except StoreUnusable as error:
        yield Finding("file", Verdict.BAD, str(error))
        return
    with closing(connection):
        connection.text_factory = decode_lossy  # bytes that are no text fit no checksum, which reports the record
        yield Finding("schema", Verdict.OK, f"format {tables.FORMAT}")  # another format cannot be opened
        try:
            damage, advice = find_damage(connection), "no run can be resumed before"
            if damage:
                yield Finding("pages", Verdict.BAD, f"damaged: {damage}", f"{repair_advice(path)}; {advice}")
            else:
                yield Finding("pages", Verdict.OK, "whole")
            yield checksums(*read_on(connection, sql_store.check_rows))
        except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite may quote a damaged page
            yield Finding("file", Verdict.BAD, f"{path} cannot be read: {error}", repair_advice(path))
            return
    yield _wal(path)


def checksums(damaged: Sequence[str], results: int, messages: int) -> Finding:
    """Return the finding about rows that were read, with the numbers of results and messages. `damaged` names the
    damaged parts.
    """
    checked = f"results: {results:,}, messages: {messages:,}"
    if not damaged:
        return Finding("checksums", Verdict.OK, f"all fit ({checked})")
    more = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
    text = f"damaged: {', '.join(damaged[:MOST_NAMED])}{more} ({checked})"
    return Finding("checksums", Verdict.BAD, text, "run these tasks again in a new run, or restore a copy")


def _wal(path: Path) -> Finding:
    size = wal_size(path)
    shown = f"{size / 1e6:,.1f} MB"
    if size > _LARGE_WAL:
        advice = "end the processes that read the store for long; the next write then shrinks the WAL"
        return Finding("wal", Verdict.WARNING, shown, advice)
    return Finding("wal", Verdict.OK, shown)
