"""The format of the database file, and the tables of a new one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plait.persistence.failpoints import reached
from plait.persistence.sqlite.transaction import transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

DATABASE_FORMAT: Final = 103
"""The one format that this plait reads and writes: `user_version` in `schema.sql`. 1 to 5 and 100 to 102 were used in
development."""


SCHEMA: Final = "SELECT type, name, tbl_name, sql FROM sqlite_schema"


@cache
def expected_schema() -> frozenset[tuple[str, str, str, str | None]]:
    """Return the rows of `SCHEMA` in a new database."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in _statements():
            connection.execute(statement)
        return frozenset(connection.execute(SCHEMA).fetchall())


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of `schema.sql` in an empty database, all in one transaction."""
    with transaction(connection, "BEGIN IMMEDIATE"):
        for statement in _statements():
            connection.execute(statement)
        reached("schema.before_commit")


def _statements() -> Iterator[str]:
    """Yield the statements of `schema.sql`. `executescript` would commit the transaction first."""
    script = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
