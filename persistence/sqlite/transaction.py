"""A transaction that never stays open."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Generator


def decode_lossy(raw: bytes) -> str:
    """A text factory for damaged text."""
    return raw.decode(errors="replace")


@contextmanager
def transaction(
    connection: sqlite3.Connection, begin: Literal["BEGIN", "BEGIN IMMEDIATE"] = "BEGIN"
) -> Generator[None]:
    """Commit at the end, roll back at any error.

    On a full disk or an I/O error SQLite has rolled back by itself: what is asked is the connection, never assumed.
    """
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
