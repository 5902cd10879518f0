"""A transaction that always ends."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Generator


def decode_lossy(raw: bytes) -> str:
    """Decode text that may be damaged. A text factory of sqlite3."""
    return raw.decode(errors="replace")


@contextmanager
def transaction(
    connection: sqlite3.Connection, begin: Literal["BEGIN", "BEGIN IMMEDIATE"] = "BEGIN"
) -> Generator[None]:
    """Commit at the end, and roll back at any error.

    SQLite rolls back by itself on a full disk and on an I/O error, so the state of the connection decides.
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
