"""What is said of a server, its databases and its errors, without a server; `postgres/` has the tests with one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from plait.errors import Conflict, Fenced, StoreBusy, StoreError, StoreRefused, StoreUnusable
from plait.persistence import postgres_connection
from plait.persistence.postgres_connection import (
    ReconnectingConnection,
    connect,
    durability_warnings,
    escaped,
    explained,
    obstacle,
)

DSN = "postgresql://me:secret@host/db"
SHOWN = "postgresql://me:***@host/db"
FIT = {"encoding": "UTF8", "role": "me", "schema": "mine", "is_read_only": False, "is_standby": False, "missing": []}


class Answering:
    """A connection that answers every question with one row."""

    def __init__(self, row: Any) -> None:
        self.row = row
        self.asked: list[tuple[str, ...]] = []

    async def fetchrow(self, *question: Any) -> Any:
        self.asked.append(question)
        return self.row


async def test_a_database_that_is_fit_has_no_obstacle() -> None:
    connection = Answering(FIT)
    assert await obstacle(connection, SHOWN) is None
    [(_, tables, rights)] = connection.asked
    needed = {f"{right} {table}" for table, right in zip(tables, rights, strict=True)}
    assert needed == {
        *(
            f"INSERT {table}"
            for table in ("texts", "runs", "tasks", "attempts", "messages", "events", "notes", "accounts")
        ),
        *(f"UPDATE {table}" for table in ("texts", "runs", "tasks", "attempts", "accounts")),
    }


ONLY_READS = "`plait runs`, `plait show` and `plait log` only read"
OBSTACLES = {
    "the encoding": (
        {"encoding": "LATIN1"},
        f"the database {SHOWN} has the encoding LATIN1, which cannot store every character; make one with UTF8: "
        "CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0",
    ),
    "a standby": (
        {"is_standby": True, "is_read_only": True},
        f"the server of {SHOWN} is a standby, which can only be read; name the primary server",
    ),
    "a role that only reads": (
        {"is_read_only": True},
        f"the role me may only read in {SHOWN}, because default_transaction_read_only is on; name another role, or "
        f"switch it off; {ONLY_READS}",
    ),
    "three missing rights": (
        {"missing": ["a", "b", "c"]},
        f"the role me may not write to {SHOWN}: it lacks a, b, c; let the owner GRANT SELECT, INSERT, UPDATE, DELETE "
        f"ON ALL TABLES IN SCHEMA mine TO me; {ONLY_READS}",
    ),
    "more missing rights": (
        {"missing": ["a", "b", "c", "d"]},
        f"the role me may not write to {SHOWN}: it lacks a, b, c, ...; let the owner GRANT SELECT, INSERT, UPDATE, "
        f"DELETE ON ALL TABLES IN SCHEMA mine TO me; {ONLY_READS}",
    ),
}


@pytest.mark.parametrize("kind", OBSTACLES)
async def test_an_obstacle_is_told_with_its_remedy(kind: str) -> None:
    found, said = OBSTACLES[kind]
    assert await obstacle(Answering(FIT | found), SHOWN) == said


@pytest.mark.parametrize(
    ("fsync", "commit", "synchronous", "standbys", "said"),
    [
        ("on", "on", "", 0, []),
        ("on", "on", "one", 2, []),
        ("on", "local", "", 0, []),
        ("off", "on", "", 0, ["fsync is off: a crash of the server's machine can damage the whole database"]),
        ("on", "off", "", 0, ["synchronous_commit is off: a crash of the server loses the last acknowledged batches"]),
        ("on", "local", "one", 1, ["synchronous_commit is local: no batch waits for the standby servers of "]),
        ("on", "on", "", 2, ["2 standby servers are asynchronous: a failover loses the last acknowledged batches; "]),
        ("off", "off", "", 1, ["fsync is off", "synchronous_commit is off", "1 standby servers are asynchronous"]),
    ],
)
async def test_settings_that_lose_batches_are_told(
    fsync: str, commit: str, synchronous: str, standbys: int, said: list[str]
) -> None:
    told = await durability_warnings(Answering((fsync, commit, synchronous, standbys)))
    assert len(told) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(told, said, strict=True))


def failed_to_leave(reason: BaseException) -> Exception:
    """Return the error of the driver when it cannot roll back over a connection that has broken with the reason."""
    error = asyncpg.InterfaceError("cannot call Transaction.__aexit__(): the underlying connection is closed")
    error.__context__ = reason
    return error


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (asyncpg.CheckViolationError("no  such\nstatus"), Conflict, "a value cannot be stored: no such status"),
        (OverflowError("too large"), Conflict, "a value cannot be stored: too large"),
        (asyncpg.DeadlockDetectedError("dead"), StoreBusy, f"the store {SHOWN} failed: dead"),
        (asyncpg.QueryCanceledError("slow"), StoreBusy, f"the store {SHOWN} failed: slow"),
        (TimeoutError(), StoreError, f"the store {SHOWN} failed: TimeoutError"),
        (OSError("no route for secret"), StoreError, f"the store {SHOWN} failed: no route for ***"),
        (
            asyncpg.UndefinedTableError("no runs"),
            StoreRefused,
            f"the store {SHOWN} refused: no runs; put the tables of plait back, or name another database",
        ),
        (
            failed_to_leave(asyncpg.AdminShutdownError("terminating connection due to administrator command")),
            StoreError,
            f"the store {SHOWN} failed: terminating connection due to administrator command",
        ),
        (
            failed_to_leave(asyncpg.DiskFullError("no space left")),
            StoreRefused,
            f"the store {SHOWN} refused: no space left; make room on the disk of the server",
        ),
        (failed_to_leave(Fenced("another owner")), Fenced, "another owner"),
        (
            failed_to_leave(KeyError("any")),
            StoreError,
            f"the store {SHOWN} failed: cannot call Transaction.__aexit__(): the underlying connection is closed",
        ),
    ],
)
def test_an_error_of_a_call_is_told_in_terms_of_a_store(error: Exception, kind: type, said: str) -> None:
    found = explained(DSN, error)
    assert (type(found), str(found)) == (kind, said)


def test_what_a_standby_refuses_passes_whatever_hides_it() -> None:
    refused = asyncpg.ReadOnlySQLTransactionError("in a read-only transaction")
    for error in (refused, failed_to_leave(refused)):
        assert type(explained(DSN, error)) is StoreRefused
        assert type(explained(DSN, error, on_standby=True)) is StoreError


def test_an_error_of_a_store_stays_as_it_is() -> None:
    error = Fenced("another owner")
    assert explained(DSN, error) is error


@pytest.mark.parametrize(
    ("text", "stored"),
    [("plain é", "plain é"), ("a\0b", "a\ufdd00b"), ("\ufdd0", "\ufdd01"), ("\ufdd00\0", "\ufdd010\ufdd00")],
)
def test_a_text_with_nul_is_stored_with_an_escape(text: str, stored: str) -> None:
    assert escaped(text) == stored


async def test_an_address_with_an_odd_password_is_refused_with_what_to_write() -> None:
    with pytest.raises(StoreUnusable, match=r"\*\*\*.* cannot be read; write /, \?, #, @ and % in a password as %2F, "):
        await connect("postgresql://me:a/secret@host/db")


class Opened:
    """A connection of the driver that can be closed, or not."""

    def __init__(self, *, can_close: bool = True, **settings: str) -> None:
        self.can_close = can_close
        self.settings = SimpleNamespace(**settings)
        self.ended: list[str] = []

    def is_closed(self) -> bool:
        return bool(self.ended)

    def get_settings(self) -> object:
        return self.settings

    async def close(self, timeout: float) -> None:
        if not self.can_close:
            raise OSError("broken")
        self.ended.append(f"closed within {timeout:g} s")

    def terminate(self) -> None:
        self.ended.append("terminated")


async def test_a_connection_has_the_service_and_the_settings_or_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Breaks(Opened):
        async def set_type_codec(self, *_names: str, **_options: object) -> None:
            raise ConnectionResetError("gone")

    connection = Breaks()

    async def opened(dsn: str, **options: Any) -> Breaks:
        given.update(options, dsn=dsn)
        return connection

    monkeypatch.setattr(asyncpg, "connect", opened)
    monkeypatch.setenv("PGSERVICE", "mine")
    with pytest.raises(ConnectionResetError):
        await connect(DSN, jit="on", enable_seqscan="off")
    assert connection.ended == ["terminated"]
    settings = given.pop("server_settings")
    assert given == {"dsn": DSN, "service": "mine", "timeout": 10.0}
    assert (settings["application_name"], settings["jit"], settings["enable_seqscan"]) == ("plait", "on", "off")


async def test_a_connection_in_doubt_is_replaced_before_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Opened] = []
    asked: list[tuple[str, dict[str, str]]] = []

    async def connect(dsn: str, **settings: str) -> Opened:
        asked.append((dsn, settings))
        opened.append(Opened())
        return opened[-1]

    async def fails(_connection: Any) -> None:
        raise ConnectionResetError("gone")

    async def refuses(_connection: Any) -> None:
        raise Conflict("no")

    async def same(connection: Any) -> Any:
        return connection

    monkeypatch.setattr(postgres_connection, "connect", connect)
    first = Opened()
    one = ReconnectingConnection(DSN, first, {"jit": "off"})
    assert await one.run(same) is first
    with pytest.raises(Conflict):
        await one.run(refuses)
    assert await one.run(same) is first
    with pytest.raises(StoreError, match="gone"):
        await one.run(fails)
    assert first.ended == ["terminated"]
    assert await one.run(same) is opened[0]
    assert asked == [(DSN, {"jit": "off"})]
    await one.close()
    await one.close()
    assert opened[0].ended == ["closed within 2 s"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"in_hot_standby": "on"}, StoreError), ({"in_hot_standby": "off"}, StoreRefused), ({}, StoreRefused)],
)
async def test_the_connection_says_whether_the_server_is_a_standby(settings: dict[str, str], kind: type) -> None:
    async def writes(_connection: Any) -> None:
        raise asyncpg.ReadOnlySQLTransactionError("in a read-only transaction")

    with pytest.raises(StoreError) as failed:
        await ReconnectingConnection(DSN, Opened(**settings)).run(writes)
    assert type(failed.value) is kind


async def test_a_connection_that_cannot_be_closed_is_dropped() -> None:
    broken = Opened(can_close=False)
    await ReconnectingConnection(DSN, broken).close()
    assert broken.ended == ["terminated"]
    await ReconnectingConnection(DSN).close()
