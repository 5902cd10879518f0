"""Bringing a database of an earlier version up to date: up only, whole or not at all."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plait.persistence.errors import StoreUnusable
from plait.persistence.failpoints import reached
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.transaction import transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA_VERSION: Final = 5
_NEW_TABLES: Final = 5
"""The version before which an older plait that is at work cannot go on once the file is brought up to date."""
_LONGEST_LEASE_S: Final = 3600.0
"""A lease that lasts longer comes from a clock that is wrong."""


def migrate(path: Path, connection: sqlite3.Connection) -> None:
    """Bring the schema up to this version, all in one transaction. Statement by statement, because `executescript`
    would commit first.
    """
    # A table that others refer to can only be replaced while foreign keys are off, which takes effect only here.
    connection.execute("PRAGMA foreign_keys = OFF")
    with transaction(connection, "BEGIN IMMEDIATE"):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if 0 < version < _NEW_TABLES:
            _check_unowned(path, connection)
        is_sound = connection.execute("PRAGMA foreign_key_check").fetchone() is None
        for step in range(version + 1, SCHEMA_VERSION + 1):
            for statement in statements_of(f"schema_{step}.sql"):
                connection.execute(statement)
        # Damage that was there before is told where it is met, and hinders nobody.
        if is_sound and connection.execute("PRAGMA foreign_key_check").fetchone() is not None:
            raise sqlite3.IntegrityError("rows refer to others that are not there")
        reached("schema.before_commit")


def _check_unowned(path: Path, connection: sqlite3.Connection) -> None:
    """An older plait that is at work finds no table any more that it could write to, and its run would be lost."""
    now = time.time()
    for run_id, pid, host, expires_at in connection.execute(sql.LIVE_OWNERS, (now, now + _LONGEST_LEASE_S)).fetchall():
        raise StoreUnusable(
            f"{path} was made by an older plait, and cannot be brought up to date while run {run_id!r} is in use by "
            f"process {pid} on {host}: let it end, or stop it; if it is gone, wait {expires_at - now:.0f} s"
        )


def statements_of(name: str) -> Iterator[str]:
    """The statements of a script that lies beside this file."""
    script = Path(__file__).with_name(name).read_text(encoding="utf-8")
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
