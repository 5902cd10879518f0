"""PostgresStore: runs in a PostgreSQL database.

Theory of a write: a `CachedRun` holds the head and the states of the tasks as of the owner's last batch. The next batch
is applied to the cached run, and its rows are written by one statement, in which every part depends on the update of
the stored head, and that update on the cached epoch and last change. So the fence, the rows and the commit are one
round trip, and READ COMMITTED is enough. If the head is another, the cached run is outdated: the exact way locks and
reads the head, and `write_rules.count_applied` decides. A failed or cut batch drops the cached run.

A statement changes no row twice. A batch with two changes of one task therefore becomes several statements in one
transaction, with the same guard in the first of them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, TypeVarTuple, cast
from zlib import crc32

import anyio

from plait.errors import Conflict, Fenced, StoreError, StoreNotOpen, StoreRefused, StoreUnusable
from plait.events import RunClaimed
from plait.failpoints import SENT, reached
from plait.persistence import sql_store, tables
from plait.persistence.postgres_connection import (
    WRITES,
    ReconnectingConnection,
    connect,
    durability_warnings,
    escaped,
    explained,
    obstacle,
    prepare,
    require_driver,
)
from plait.persistence.sql_store import OF_ONE_STATEMENT, SQLStore
from plait.persistence.store_records import Purged
from plait.safe_text import SCHEMES, masked_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from plait.persistence.apply_events import Applied, CachedRun, Rows
    from plait.persistence.postgres_connection import Connection
    from plait.persistence.store_records import Batch, Note
    from plait.persistence.tables import Mode, Reading, Write

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class PostgresStore(SQLStore):
    """Keeps runs in the PostgreSQL database at `dsn`, `postgresql://user@host/database`. Implements `Store`; asyncio
    only.

    An async context manager; outside of the block every call raises StoreError. Entering raises StoreUnusable if the
    server cannot be reached or the database cannot be used. A closed store can be entered again. The modes:

    - `"create"`: create the tables if the database has none.
    - `"existing"`: the tables have to be there. For continuing a run.
    - `"read"`: only read. `write` raises StoreNotOpen.

    A password comes from PGPASSFILE (`~/.pgpass`), PGPASSWORD, or the address; no message shows the password.

    Any number of processes and hosts may share a database. A `write` that raised is *unknown*: committed or not.
    Writing the same batch again, over a new connection, resolves the doubt.
    """

    def __init__(self, dsn: str, *, mode: Mode = "create") -> None:
        if mode not in {"create", "existing", "read"}:
            raise ValueError(f"a store's mode is 'create', 'existing' or 'read', not {mode!r}")
        if not dsn.startswith(SCHEMES):
            raise ValueError(
                f"a PostgresStore needs an address like postgresql://user@host/database, not {masked_address(dsn)!r}"
            )
        self.address = masked_address(dsn)
        """The address, with a password replaced by `***`."""
        self.mode: Mode = mode
        self._dsn = dsn
        self._writer: ReconnectingConnection | None = None
        self._reader: ReconnectingConnection | None = None
        self._listener: Listener | None = None
        self._runs: dict[str, CachedRun] = {}
        self._store_id: str | None = None
        self.batches = Counter[str]()
        """The number of batches that were written: `all`, and `single` for those that were one round trip."""
        self.server_version = ""
        """The version of the server, empty before the store was opened."""

    def __repr__(self) -> str:
        return f"PostgresStore({self.address!r}, mode={self.mode!r})"

    @property
    def files_root(self) -> Path | None:
        """The folder on this host for files that outlive their process: `~/.local/state/plait/STORE_ID`, or below
        XDG_STATE_HOME. None before the store was opened.
        """
        if self._store_id is None:
            return None
        state = os.environ.get("XDG_STATE_HOME")
        return (Path(state) if state else Path.home() / ".local" / "state") / "plait" / self._store_id

    async def __aenter__(self) -> Self:
        if self._writer is not None:
            raise StoreError(f"the store {self.address} is open already; use one object for each opening")
        require_driver()
        try:
            connection = await connect(self._dsn, **WRITES)
        except Exception as error:
            # Without the cause, which may show the address with its password.
            why, advice = explained(self._dsn, error), "check the address, the password, and that the server is running"
            advice = "" if isinstance(why, StoreRefused) else f"; {advice}"
            raise StoreUnusable(f"cannot open the store: {why}{advice}") from None
        try:
            self._store_id = await prepare(connection, self.mode, self.address)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, Exception) and not isinstance(error, StoreError):
                raise StoreUnusable(f"cannot open the store: {explained(self._dsn, error)}") from None
            raise
        self.server_version = ".".join(map(str, connection.get_server_version()[:2]))
        self._writer = ReconnectingConnection(self._dsn, connection, WRITES)
        self._reader = ReconnectingConnection(self._dsn)
        self._listener = Listener(self._dsn)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish all calls and close the connections. A second call does nothing."""
        connections = self._writer, self._reader
        self._writer = self._reader = None
        self._runs = {}
        for one in connections:
            if one is not None:
                await one.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def write(self, batch: Batch) -> None:
        await self._write(_write_batch, batch, self._runs, self.batches)

    async def send(self, run_id: str, note: Note) -> None:
        await self.transact(_send_note(run_id, note))

    async def transact(self, writing: Reading[T]) -> T:
        """Run the statements of `writing` in one transaction, and return its result."""
        return await self._write(_transact, writing)

    async def wait_for_note(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after 5 s."""
        if self._listener is None:
            raise StoreNotOpen(f"the store {self.address} is not open; use it inside `async with`")
        await self._listener.wait(run_id)

    async def silence(self, run_id: str) -> float:
        """Return the seconds since the last batch of the run, by the server's clock; 0 for an unknown run."""
        return await self._call(self._reader, lambda connection: connection.fetchval(_SILENCE, run_id)) or 0.0

    async def purge(self, run_ids: Collection[str]) -> Purged:
        """Delete all of the runs, as `SQLiteStore.purge` does. The server frees space by its own VACUUM, and
        `Purged.remains` says where copies stay.
        """
        deleted = await self.transact(_delete(run_ids))
        copies = "the log, the backups and pages before the next VACUUM of the server keep copies"
        return Purged(deleted, 0, f"the runs are deleted; {copies}" if deleted else None)

    async def obstacle(self) -> str | None:
        """Return why no run can be stored here, in one line with the remedy; None if runs can be stored. Opening the
        store in another mode than "read" raises StoreUnusable with the same line.
        """
        return await self._call(self._reader, obstacle, self.address)

    async def warnings(self) -> tuple[str, ...]:
        """Return a line for each setting of the server under which acknowledged batches may be lost."""
        return await self._call(self._reader, durability_warnings)

    async def _read(self, read: Callable[[*Ts], Reading[T]], *args: *Ts) -> T:
        async def whole(connection: Connection) -> T:
            reading = read(*args)
            if read in OF_ONE_STATEMENT:
                return await _read(connection, reading)
            async with connection.transaction(isolation="repeatable_read"):
                return await _read(connection, reading)

        return await self._call(self._reader, whole)

    async def _write(self, function: Callable[[Connection, *Ts], Awaitable[T]], *args: *Ts) -> T:
        if self._writer is not None and self.mode == "read":
            raise StoreNotOpen(f"the store {self.address} was opened for reading only; open it with mode 'existing'")
        return await self._call(self._writer, function, *args)

    async def _call(
        self,
        connection: ReconnectingConnection | None,
        function: Callable[[Connection, *Ts], Awaitable[T]],
        *args: *Ts,
    ) -> T:
        if connection is None:
            raise StoreNotOpen(f"the store {self.address} is not open; use it inside `async with`")
        return await connection.run(lambda opened: function(opened, *args))


# The words of this database. Only the clock of the server judges leases: the clocks of owners and readers differ.

_WORDS: Final = {
    "among": "= ANY(?::text[])",
    # Each by its key. A plan for any number of names would read every task of the run.
    "named": (
        "(SELECT found.* FROM unnest(?::text[]) AS n (name), "
        "LATERAL (SELECT * FROM tasks WHERE task_id = n.name AND run_id = ? OFFSET 0) AS found)"
    ),
    "expired": (
        "(owner_id IS NOT NULL AND coalesce(extract(epoch FROM clock_timestamp() - written_at) > lease_s, true))"
    ),
    "now": "extract(epoch FROM clock_timestamp())::float8",
    "lock": " FOR NO KEY UPDATE",
    "bytes_of": "octet_length",
    "bytes": "TEXT",
}
_UNIQUE_VIOLATION: Final = "23505"
_SILENCE: Final = "SELECT extract(epoch FROM clock_timestamp() - written_at)::float8 FROM runs WHERE run_id = $1"


@lru_cache(maxsize=512)
def _rendered(statement: str) -> str:
    """Return a statement of `tables` for this database: with `$1`, `$2` in the place of `?`."""
    first, *rest = statement.format_map(_WORDS).split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


async def _read(connection: Connection, reading: Reading[T]) -> T:
    try:
        statement, values = next(reading)
        while True:
            lists = cast("tuple[str | int | list[str], ...]", values)
            arguments = [[escaped(name) for name in value] if isinstance(value, list) else value for value in lists]
            statement, values = reading.send(await connection.fetch(_rendered(statement), *arguments))
    except StopIteration as done:
        return cast("T", done.value)


def _arrays(write: Write, rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    """Return the values of each column."""
    if write is tables.ADD_TEXT:  # in any other order two batches with the same texts could wait for each other
        rows = sorted(rows)
    arrays: list[list[Any]] = []
    for column, values in zip((*write.columns, *write.key), zip(*rows, strict=True), strict=True):
        if tables.KINDS[column] == "text":
            arrays.append([None if value is None else escaped(value) for value in values])
        else:
            arrays.append(list(values))
    return arrays


async def _write_rows(connection: Connection, rows: Rows, head: Sequence[Any] = ()) -> bool:
    """Write the rows with the head, a statement and its values. Return False, with nothing written, if the stored head
    is another than expected.
    """
    writes = tuple(write for write, of_one in rows.items() if of_one)
    arrays = [array for write in writes for array in _arrays(write, rows[write])]
    if not writes and not head:
        return True
    of_head, *values = head or (None,)
    written: int = await connection.fetchval(_rendered(tables.for_all_rows(writes, of_head)), *values, *arrays)
    return written == 1


async def _write_batch(connection: Connection, batch: Batch, runs: dict[str, CachedRun], counts: Counter[str]) -> None:
    """Apply the changes that are not applied yet, all or nothing. Raises Fenced, Conflict, or an error of asyncpg."""
    run = runs.pop(batch.run_id, None)
    counts["all"] += 1
    if run is None or (run := await _write_next(connection, batch, run, counts)) is None:
        try:
            run = await _write_exactly(connection, batch)
        except Exception as error:
            if getattr(error, "sqlstate", None) != _UNIQUE_VIOLATION:
                raise
            run = await _write_exactly(connection, batch)  # another process created the run at the same time
    if run is not None and run.head.owner is not None:
        runs[batch.run_id] = run


async def _write_next(connection: Connection, batch: Batch, run: CachedRun, counts: Counter[str]) -> CachedRun | None:
    """Write the batch onto the cached run, and return the run after it. Return None, with nothing written, if that run
    is outdated or refuses the batch.
    """
    looks_up = bool(run.missing(batch.events)) or run.needs_size(batch.events)
    try:
        applied = await _read(connection, sql_store.apply_batch(batch, run))
    except (Conflict, Fenced):
        return None
    if applied is None or applied.before is None:
        return None
    reached("txn.begun")
    if len(applied.segments) <= 1:
        _about_to_commit()
        is_written = await _write_all_rows(connection, batch, applied)
        counts["single"] += is_written and not looks_up
    else:
        async with connection.transaction():
            is_written = await _write_all_rows(connection, batch, applied)
            _about_to_commit()
    if not is_written:
        return None
    reached("txn.after_commit")
    return applied.run


async def _write_all_rows(connection: Connection, batch: Batch, applied: Applied) -> bool:
    """Write what the batch makes of the run, and the length of the lease if the batch claims the run. Return False,
    with nothing written, if the stored head is another than before the batch.
    """
    segments, before = applied.segments, applied.before
    if before is None:
        await _write_rows(connection, segments.pop(0))  # adds the head
    guard = (0, 0, None) if before is None else before.last_written
    # Both times come from the owner's clock, so its error cancels out.
    leases = [
        claim.lease_expires_at - datetime.fromisoformat(claim.at).timestamp()
        for claim in batch.events
        if isinstance(claim, RunClaimed)
    ]
    write, values = applied.head
    head = write, *values, leases[-1] if leases else None, batch.run_id, *guard
    is_written = await _write_rows(connection, segments[0] if segments else {}, head)
    for segment in segments[1:] if is_written else ():
        await _write_rows(connection, segment)
    return is_written


def _about_to_commit() -> None:
    """Reach the failpoints on both sides of sending the statement that follows, which commits. The driver sends a
    statement in the step of the event loop that begins the call, if the server has prepared the statement before.
    """
    reached("txn.before_commit")
    asyncio.get_running_loop().call_soon(reached, SENT)


async def _write_exactly(connection: Connection, batch: Batch) -> CachedRun | None:
    """Lock and read the head of the run, and apply what is not applied yet. Return the run after the batch."""
    async with connection.transaction():
        reached("txn.begun")
        applied = await _read(connection, sql_store.apply_batch(batch, None))
        if applied is None:
            return None
        if not await _write_all_rows(connection, batch, applied):
            raise AssertionError(f"the locked head of run {batch.run_id!r} changed")
        if applied.before is not None and applied.run.head.owner is not None:
            # An owner goes on from here. Its next batches find their tasks without looking them up.
            await _read(connection, sql_store.open_states(batch.run_id, applied.run))
        _about_to_commit()
    reached("txn.after_commit")
    return applied.run


async def _transact(connection: Connection, writing: Reading[T]) -> T:
    async with connection.transaction():
        reached("txn.begun")
        result = await _read(connection, writing)
        _about_to_commit()
    reached("txn.after_commit")
    return result


def _send_note(run_id: str, note: Note) -> Reading[None]:
    yield from sql_store.add_note(run_id, note)
    # Here only: a NOTIFY takes a lock of the whole cluster at the commit, and would slow down every batch.
    yield "SELECT pg_notify(?, ?)", (_CHANNEL, _payload(run_id))


def _delete(run_ids: Collection[str]) -> Reading[tuple[str, ...]]:
    # No batch adds a reference to a text meanwhile: a batch adds the text too.
    yield "LOCK TABLE texts IN SHARE ROW EXCLUSIVE MODE", ()
    return (yield from sql_store.delete_runs(run_ids))


# Notifications of notes. A lost notification only delays the note: the owner reads its inbox after LONGEST_WAIT_S
# seconds in any case.

_CHANNEL: Final = "plait_notes"
KEPT_RUNS: Final = 10_000
"""Number of runs, the last waited for, whose notifications are kept until the next `wait`."""
LONGEST_WAIT_S: Final = 5.0
"""Seconds after which `wait` returns without a notification: connections can be lost unseen."""


def _payload(run_id: str) -> str:
    """Return the text of a notification about the run. A payload is limited to 8,000 bytes, an id is not."""
    return str(crc32(run_id.encode()))


class Listener:
    """One connection that listens for the notes of all runs of a store. The first `wait` opens the connection."""

    def __init__(self, dsn: str) -> None:
        # A pause, because a server may refuse each connection, or drop it at once.
        self._connection = ReconnectingConnection(dsn, pause_s=1.0)
        self._listening: Connection | None = None
        self._arrived: OrderedDict[str, asyncio.Event] = OrderedDict()
        """An event for each run, by payload, the last waited for at the end. Set if a note may have arrived."""

    async def wait(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after `LONGEST_WAIT_S` seconds. The first call
        for a run, and the first call over a new connection, returns at once: earlier notes were not notified.
        """
        arrived = self._event_of(_payload(run_id))
        try:
            await self._connection.run(self._listen)
        except StoreError:
            return  # the next try waits
        with anyio.move_on_after(LONGEST_WAIT_S):
            await arrived.wait()
        arrived.clear()

    def _event_of(self, run: str) -> asyncio.Event:
        arrived = self._arrived.get(run)
        if arrived is None:
            arrived = self._arrived[run] = asyncio.Event()
            arrived.set()
            if len(self._arrived) > KEPT_RUNS:  # a run whose owner still waits is added again by the next wait
                self._arrived.popitem(last=False)
        self._arrived.move_to_end(run)
        return arrived

    async def _listen(self, connection: Connection) -> None:
        if connection is not self._listening:
            await connection.add_listener(_CHANNEL, self._notified)
            self._listening = connection
            self._wake_all()

    def _notified(self, _connection: Any, _pid: int, _channel: str, run: object) -> None:
        if arrived := self._arrived.get(str(run)):
            arrived.set()

    def _wake_all(self) -> None:
        for arrived in self._arrived.values():
            arrived.set()

    def close(self) -> None:
        """Drop the connection."""
        self._connection.drop()
        self._wake_all()
