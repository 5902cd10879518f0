"""Connections to a PostgreSQL server: opened, replaced when in doubt, and their errors in our terms; and whether a
database is fit for a store. The only user of asyncpg, which is imported when a store opens: the name `PostgresStore`
works without the extra.

Every message shows the address without its password.
"""

from __future__ import annotations

import asyncio
import math
import os
import struct
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from uuid import uuid4

import anyio

from plait.errors import Conflict, StoreBusy, StoreError, StoreRefused, StoreUnusable
from plait.persistence import tables
from plait.safe_text import MASK, has_unescaped_password, masked_address, passwords

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")
Connection: TypeAlias = Any
"""A connection of asyncpg, which has no types for rows."""

CONNECT_TIMEOUT_S: Final = 10.0
_SETTINGS: Final = {
    "application_name": "plait",
    "jit": "off",  # compiling a statement costs more than these statements
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
    # The server drops the connection of a host that is away after about 11 s, and with it the locks of its transaction.
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "11000",
    # To plan the statement of a small batch anew took half of the server's time. A generic plan also expects as many
    # rows of a run as `n_distinct` says below, where the statistics may not know the run yet.
    "plan_cache_mode": "force_generic_plan",
}
WRITES: Final = {
    # A batch finds its rows by their keys, whatever the statistics say.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
"""The further settings of a connection that writes batches."""
_SCHEMA_LOCK: Final = 0x706C616974  # "plait"
_WORDS: Final = {
    "text": 'TEXT COLLATE "C"',  # names are compared byte by byte, whatever the collation of the database
    "int": "BIGINT",
    "float": "DOUBLE PRECISION",
    "bytes": "BYTEA",
    "serial": "BIGINT NOT NULL PRIMARY KEY GENERATED ALWAYS AS IDENTITY",
    "table": "",
    "keyed": "",
}
_TABLES: Final = f"""{tables.schema(_WORDS)}
-- By the server's clock: the time of the last batch, and the seconds after it for which the owner is taken to be alive.
ALTER TABLE runs ADD written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(), ADD lease_s DOUBLE PRECISION;
-- Room for the next versions of a row in its page: then no index changes.
ALTER TABLE runs SET (fillfactor = 50);
ALTER TABLE tasks SET (fillfactor = 50);
-- After many small runs the server would expect few rows in a large one, and read all of them for each task.
ALTER TABLE tasks ALTER run_id SET (n_distinct = 1), ALTER position SET (n_distinct = -1),
    ALTER task_id SET (n_distinct = -1);
ALTER TABLE attempts ALTER run_id SET (n_distinct = 1), ALTER position SET (n_distinct = -1);
ALTER TABLE messages ALTER run_id SET (n_distinct = 1), ALTER position SET (n_distinct = -1);
-- One row: the format of the tables, and the id of this store, which names the folder of agents' files.
CREATE TABLE plait_store (format BIGINT NOT NULL, store_id TEXT NOT NULL);
"""

_REMEDIES: Final = {
    "42501": "let the owner of the tables GRANT the rights to this role",
    "25006": "let this role write (default_transaction_read_only), or name the primary server",
    "3D000": "create the database, or correct the address",
    "3F000": "create the schema, or correct the address",
    "42P01": "put the tables of plait back, or name another database",
    "28000": "correct the role, or the server's pg_hba.conf",
    "28P01": "correct the password",
    "53100": "make room on the disk of the server",
}
"""For each SQLSTATE with which the server refuses every write until a person changes something: what to change."""


def require_driver() -> None:
    """Raise StoreUnusable if asyncpg cannot be imported."""
    try:
        import_module("asyncpg")
    except ImportError as error:
        why = f"a PostgresStore needs the package asyncpg: pip install 'plait[postgres]' ({error})"
        raise StoreUnusable(why) from error


def explained(dsn: str, error: Exception, *, on_standby: bool = False) -> StoreError:
    """Return the error of a call in terms of a store. A standby refuses writes until it is promoted, which passes."""
    if isinstance(error, StoreError):
        return error
    import asyncpg  # noqa: PLC0415 - of an extra

    why = error.__context__
    if isinstance(error, asyncpg.InterfaceError) and isinstance(why, asyncpg.PostgresError | StoreError):
        return explained(dsn, why, on_standby=on_standby)  # leaving the transaction failed only then
    refused_values = (
        asyncpg.IntegrityConstraintViolationError,
        asyncpg.DataError,
        asyncpg.ProgramLimitExceededError,
        asyncpg.PLPGSQLError,  # a trigger raises
        asyncpg.UnknownPostgresError,  # with a code of its own
        UnicodeEncodeError,
        OverflowError,
        struct.error,
    )
    busy = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, asyncpg.QueryCanceledError)
    text = str(error) or type(error).__name__
    for password in passwords(dsn):
        text = text.replace(password, MASK)
    text = " ".join(text.split())
    if isinstance(error, refused_values):
        return Conflict(f"a value cannot be stored: {text}")
    remedy = _REMEDIES.get(getattr(error, "sqlstate", ""))
    if remedy is not None and not on_standby:
        return StoreRefused(f"the store {masked_address(dsn)} refused: {text}; {remedy}")
    kind = StoreBusy if isinstance(error, busy) else StoreError
    return kind(f"the store {masked_address(dsn)} failed: {text}")


_ESCAPE: Final = "\ufdd0"
"""A character that Unicode excludes from texts. PostgreSQL stores no U+0000, so `_ESCAPE` and a digit stand for it."""


def escaped(text: str) -> str:
    """Return the text as the database stores it. asyncpg calls a codec for a value, but not for a value of an array."""
    if "\0" in text or _ESCAPE in text:
        return text.replace(_ESCAPE, f"{_ESCAPE}1").replace("\0", f"{_ESCAPE}0")
    return text


def _encode(text: str) -> bytes:
    return escaped(text).encode()


def _decode(raw: bytes) -> str:
    text = str(raw, "utf-8")
    if _ESCAPE in text:
        text = text.replace(f"{_ESCAPE}0", "\0").replace(f"{_ESCAPE}1", _ESCAPE)
    return text


async def connect(dsn: str, **settings: str) -> Connection:
    """Return a new connection. Raises StoreUnusable for an address that cannot be read, an error of asyncpg, OSError or
    TimeoutError.
    """
    import asyncpg  # noqa: PLC0415 - of an extra

    if has_unescaped_password(dsn):  # the driver would take a part for the port or the database, and quote it
        raise StoreUnusable(
            f"the address {masked_address(dsn)} cannot be read; "
            "write /, ?, #, @ and % in a password as %2F, %3F, %23, %40, %25"
        )
    # asyncpg reads PGSERVICE only after it has read the service file.
    service, settings = os.environ.get("PGSERVICE"), {**_SETTINGS, **settings}
    connection = await asyncpg.connect(dsn, service=service, timeout=CONNECT_TIMEOUT_S, server_settings=settings)
    try:
        await connection.set_type_codec("text", schema="pg_catalog", encoder=_encode, decoder=_decode, format="binary")
    except BaseException:
        connection.terminate()
        raise
    return connection


class ReconnectingConnection:
    """One connection, used by one call at a time. A call that was cut or failed may have left the connection in doubt:
    the next call gets a new connection, `pause_s` seconds at least after the connection before.
    """

    def __init__(
        self, dsn: str, connection: Connection | None = None, settings: Mapping[str, str] = {}, *, pause_s: float = 0.0
    ) -> None:
        self._dsn = dsn
        self._connection = connection
        self._pause_s = pause_s
        self._next_opening = -math.inf
        self._settings = settings
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[[Connection], Awaitable[T]]) -> T:
        """Return the result of `function(connection)`. Raises StoreError."""
        async with self._lock:
            connection = self._connection
            try:
                if connection is None or connection.is_closed():
                    await anyio.sleep_until(self._next_opening)
                    self._next_opening = anyio.current_time() + self._pause_s
                    self._connection = connection = await connect(self._dsn, **self._settings)
                return await function(connection)
            except StoreError:
                raise
            except Exception as error:  # any may come from a connection that breaks, those of the driver's own bugs too
                # PostgreSQL 14 and later report whether the server is a standby.
                on_standby = connection is not None and getattr(connection.get_settings(), "in_hot_standby", "") == "on"
                self.drop()
                raise explained(self._dsn, error, on_standby=on_standby) from None
            except BaseException:
                self.drop()
                raise

    def drop(self) -> None:
        """Close the socket at once. The server rolls back an open transaction."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        """Wait for the call under way, then close the connection. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                connection, self._connection = self._connection, None
                if connection is not None and not connection.is_closed():
                    try:
                        await connection.close(timeout=2)
                    except Exception:
                        connection.terminate()


async def prepare(connection: Connection, mode: tables.Mode, shown: str) -> str:
    """Create the tables if `mode` is create and there are none. Return the id of the store. Raises StoreUnusable, also
    if no run can be stored, unless the mode is read.
    """
    lacks_tables = await connection.fetchval(_LACKS_TABLES)
    if lacks_tables and mode != "create":
        raise StoreUnusable(f"the database {shown} has no tables of plait; `plait run PLAN --store ...` makes them")
    if mode != "read" and (reason := await obstacle(connection, shown)) is not None:
        raise StoreUnusable(reason)
    if lacks_tables:
        async with connection.transaction():
            # CREATE ... IF NOT EXISTS fails if two processes create at once.
            await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
            if await connection.fetchval(_LACKS_TABLES):
                await _create_tables(connection, shown)
    format_number, store_id = await connection.fetchrow("SELECT format, store_id FROM plait_store")
    if format_number != tables.FORMAT:
        raise StoreUnusable(
            f"the tables in {shown} have format {format_number}, but this plait reads format {tables.FORMAT}; name "
            "another database"
        )
    return str(store_id)


_LACKS_TABLES: Final = (
    "SELECT NOT EXISTS (SELECT 1 FROM pg_catalog.pg_class WHERE relname = 'plait_store' AND pg_table_is_visible(oid))"
)
"""`to_regclass` would answer the second question from a cache that is older than the lock."""


async def _create_tables(connection: Connection, shown: str) -> None:
    import asyncpg  # noqa: PLC0415 - of an extra

    try:
        await connection.execute(_TABLES)
    except (asyncpg.DuplicateObjectError, asyncpg.DuplicateTableError) as error:
        raise StoreUnusable(f"the database {shown} has other tables with names of plait's: {error}") from error
    await connection.execute("INSERT INTO plait_store (format, store_id) VALUES ($1, $2)", tables.FORMAT, uuid4().hex)


_FITNESS: Final = """
SELECT current_setting('server_encoding') AS encoding, current_user AS role, current_schema() AS schema,
    current_setting('transaction_read_only') = 'on' AS is_read_only, pg_is_in_recovery() AS is_standby,
    ARRAY(
        SELECT needed.right || ' on ' || needed.name
        FROM unnest($1::text[], $2::text[]) AS needed (name, "right")
        WHERE NOT has_table_privilege(to_regclass(needed.name), needed.right)
    ) AS missing
"""
_UPDATED: Final = ("texts", "runs", "tasks", "attempts", "accounts")


async def obstacle(connection: Connection, shown: str) -> str | None:
    """Return why no run can be stored over the connection, in one line with the remedy; None if runs can be stored."""
    needed = [*((name, "INSERT") for name in tables.COLUMNS), *((name, "UPDATE") for name in _UPDATED)]
    fitness = await connection.fetchrow(_FITNESS, *map(list, zip(*needed, strict=True)))
    if fitness["encoding"] != "UTF8":
        return (
            f"the database {shown} has the encoding {fitness['encoding']}, which cannot store every character; make "
            "one with UTF8: CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0"
        )
    if fitness["is_standby"]:
        return f"the server of {shown} is a standby, which can only be read; name the primary server"
    only_reads = "`plait runs`, `plait show` and `plait log` only read"
    if fitness["is_read_only"]:
        return (
            f"the role {fitness['role']} may only read in {shown}, because default_transaction_read_only is on; name "
            f"another role, or switch it off; {only_reads}"
        )
    if fitness["missing"]:
        lacks = ", ".join(fitness["missing"][:3]) + (", ..." if len(fitness["missing"]) > 3 else "")
        return (
            f"the role {fitness['role']} may not write to {shown}: it lacks {lacks}; let the owner GRANT SELECT, "
            f"INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {fitness['schema']} TO {fitness['role']}; {only_reads}"
        )
    return None


_DURABILITY: Final = """
SELECT current_setting('fsync'), current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
    (SELECT count(*) FROM pg_stat_replication WHERE application_name <> 'pg_basebackup')
"""


async def durability_warnings(connection: Connection) -> tuple[str, ...]:
    """Return a line for each setting of the server under which acknowledged batches may be lost."""
    warnings: list[str] = []
    fsync, commit, synchronous, standbys = await connection.fetchrow(_DURABILITY)
    if fsync == "off":
        warnings.append("fsync is off: a crash of the server's machine can damage the whole database")
    if commit == "off":
        warnings.append("synchronous_commit is off: a crash of the server loses the last acknowledged batches")
    if commit == "local" and synchronous:
        warnings.append(
            "synchronous_commit is local: no batch waits for the standby servers of synchronous_standby_names, and a "
            "failover loses the last acknowledged batches; set synchronous_commit to on"
        )
    # Without synchronous_standby_names every standby is asynchronous. A usual user reads NULL as its `sync_state`.
    if standbys and not synchronous:
        warnings.append(
            f"{standbys} standby servers are asynchronous: a failover loses the last acknowledged batches; "
            "set synchronous_standby_names"
        )
    return tuple(warnings)
