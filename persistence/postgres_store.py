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
import math
import os
from collections import Counter, OrderedDict
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast
from zlib import crc32

import anyio

from plait.errors import Conflict, Gap, StoreError, StoreNotOpen, StoreRefused, StoreUnusable
from plait.events import RunClaimed, RunCreated
from plait.failpoints import SENT, reached
from plait.persistence import delete_runs, read_records, tables
from plait.persistence.apply_events import apply_events
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
from plait.persistence.read_records import OF_ONE_STATEMENT, SQLStore
from plait.safe_text import SCHEMES, masked_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from plait.persistence.apply_events import Applied, CachedRun, Rows
    from plait.persistence.delete_runs import Purged
    from plait.persistence.postgres_connection import Connection, Mode
    from plait.persistence.read_records import Reading
    from plait.persistence.store_records import Batch, Note
    from plait.persistence.tables import Write

P = ParamSpec("P")
T = TypeVar("T")
Runs = dict[str, "CachedRun"]
"""The runs that are being written, by run id."""


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
        self._runs: Runs = {}
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
        self._writer = ReconnectingConnection(self._dsn, connection, **WRITES)
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
        try:
            await self._write(_write_batch, batch, self._runs, self.batches)
        except Gap:
            raise
        except Conflict as error:
            raise type(error)(_of_run(batch.run_id, error)) from None

    async def send(self, run_id: str, note: Note) -> None:
        try:
            await self._write(_send_note, run_id, note)
        except Conflict as error:
            raise type(error)(_of_run(run_id, error)) from None

    async def wait_for_note(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after 5 s."""
        if self._listener is None:
            raise StoreNotOpen(f"the store {self.address} is not open; use it inside `async with`")
        await self._listener.wait(run_id)

    async def silence(self, run_id: str) -> float:
        """Return the seconds since the last batch of the run, by the server's clock; 0 for an unknown run."""
        return await self._call(self._reader, lambda connection: connection.fetchval(_SILENCE, run_id)) or 0.0

    async def run_sizes(self) -> dict[str, int]:
        """Return the bytes of text by run id: prompts, results, messages, settings. Reads all tables."""
        return await self._call(self._reader, _run_sizes)

    async def purge(self, run_ids: Collection[str]) -> Purged:
        """Delete all of the runs.

        Raises Conflict, and deletes nothing, if a run has not ended (completed, failed or cancelled) or has an owner.
        Unknown ids are ignored. The server frees space by its own VACUUM. `Purged.remains` says where copies stay.
        """
        return await self._write(_purge, tuple(run_ids))

    async def obstacle(self) -> str | None:
        """Return why no run can be stored here, in one line with the remedy; None if runs can be stored. Opening the
        store in another mode than "read" raises StoreUnusable with the same line.
        """
        return await self._call(self._reader, obstacle, self.address)

    async def warnings(self) -> tuple[str, ...]:
        """Return a line for each setting of the server under which acknowledged batches may be lost."""
        return await self._call(self._reader, durability_warnings)

    async def _read(self, read: Callable[P, Reading[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        async def whole(connection: Connection) -> T:
            reading = read(*args, **kwargs)
            if read in OF_ONE_STATEMENT:
                return await _read(connection, reading)
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                return await _read(connection, reading)

        return await self._call(self._reader, whole)

    async def _write(
        self, function: Callable[Concatenate[Connection, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._writer is not None and self.mode == "read":
            raise StoreNotOpen(f"the store {self.address} was opened for reading only; open it with mode 'existing'")
        return await self._call(self._writer, function, *args, **kwargs)

    async def _call(
        self,
        connection: ReconnectingConnection | None,
        function: Callable[Concatenate[Connection, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        if connection is None:
            raise StoreNotOpen(f"the store {self.address} is not open; use it inside `async with`")
        return await connection.run(lambda opened: function(opened, *args, **kwargs))


def _of_run(run_id: str, error: StoreError) -> str:
    text = str(error)
    return text if text.startswith("run ") else f"run {run_id!r}: {text}"


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
}
_LOCK: Final = " FOR NO KEY UPDATE"
_UNIQUE_VIOLATION: Final = "23505"
_SILENCE: Final = "SELECT extract(epoch FROM clock_timestamp() - written_at)::float8 FROM runs WHERE run_id = $1"


@lru_cache(maxsize=512)
def _rendered(statement: str) -> str:
    """Return a statement of `tables` for this database: with `$1`, `$2` in the place of `?`."""
    first, *rest = statement.format_map(_WORDS).split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


async def _fetch(connection: Connection, statement: str, values: Sequence[str | int | list[str]]) -> Any:
    given = [[escaped(name) for name in value] if isinstance(value, list) else value for value in values]
    return await connection.fetch(_rendered(statement), *given)


async def _fetch_one(connection: Connection, statement: str, *values: Any) -> int | None:
    """Return the first number of the first row."""
    found: int | None = await connection.fetchval(_rendered(statement), *values)
    return found


async def _read(connection: Connection, reading: Reading[T]) -> T:
    try:
        statement, values = next(reading)
        while True:
            statement, values = reading.send(await _fetch(connection, statement, values))
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
    if not head:
        return not writes or await _fetch_one(connection, tables.for_all_rows(writes), *arrays) == 1
    columns, *values = head
    return await _fetch_one(connection, tables.for_all_rows(writes, columns), *values, *arrays) == 1


async def _write_batch(connection: Connection, batch: Batch, runs: Runs, counts: Counter[str]) -> None:
    """Apply the changes that are not applied yet, all or nothing. Raises Fenced, Conflict, or an error of asyncpg."""
    run = runs.pop(batch.run_id, None)
    counts["all"] += 1
    if run is not None and not _is_next(batch, run):
        run = None
    if run is None or not await _write_next(connection, batch, run, counts):
        try:
            run = await _write_exactly(connection, batch)
        except Exception as error:
            if getattr(error, "sqlstate", None) != _UNIQUE_VIOLATION:
                raise
            run = await _write_exactly(connection, batch)  # another process created the run at the same time
    if run is not None and run.head.owner is not None:
        runs[batch.run_id] = run


def _is_next(batch: Batch, run: CachedRun) -> bool:
    """Return whether the batch continues the run from here, by the same owner, without a claim."""
    return (
        batch.epoch == run.head.epoch
        and (batch.owner_id is None or batch.owner_id == run.head.claims[-1].owner_id)
        and batch.first_seq == run.head.last_seq + 1
        and len(batch.events) > 0
        and not any(isinstance(one, (RunCreated, RunClaimed)) for one in batch.events)
    )


async def _write_next(connection: Connection, batch: Batch, run: CachedRun, counts: Counter[str]) -> bool:
    """Write the batch that continues the cached run. Return False, with nothing written, if that run is outdated."""
    looks_up = bool(run.missing(batch.events)) or run.needs_size(batch.events)
    if looks_up:
        await _read(connection, read_records.states(batch.run_id, run, batch.events))
    try:
        applied = apply_events(batch.run_id, run, batch.first_seq, batch.events)
    except Conflict:
        return False
    reached("txn.begun")
    if len(applied.segments) <= 1:
        _about_to_commit()
        is_written = await _write_all_rows(connection, batch.run_id, applied)
        counts["single"] += is_written and not looks_up
    else:
        async with connection.transaction():
            is_written = await _write_all_rows(connection, batch.run_id, applied)
            _about_to_commit()
    if is_written:
        reached("txn.after_commit")
    return is_written


async def _write_all_rows(connection: Connection, run_id: str, applied: Applied, lease_s: float | None = None) -> bool:
    """Write what the batch makes of the run, and the length of the lease if the batch claims the run. Return False,
    with nothing written, if the stored head is another than before the batch.
    """
    segments, before = applied.segments, applied.before
    if before is None:
        await _write_rows(connection, segments.pop(0))  # adds the head
        guard: tuple[Any, ...] = run_id, 0, 0, None
    else:
        guard = run_id, before.epoch, before.last_seq, before.owner and before.owner.owner_id
    write, values = applied.head
    is_written = await _write_rows(connection, segments[0] if segments else {}, (write, *values, lease_s, *guard))
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
        applied = await _read(connection, read_records.apply_batch(batch, None, _LOCK))
        if applied is None:
            return None
        claims = [_lease(event) for event in batch.events if isinstance(event, RunClaimed)]
        if not await _write_all_rows(connection, batch.run_id, applied, claims[-1] if claims else None):
            raise AssertionError(f"the locked head of run {batch.run_id!r} changed")
        if applied.before is not None and applied.run.head.owner is not None:
            # An owner goes on from here. Its next batches find their tasks without looking them up.
            await _read(connection, read_records.open_states(batch.run_id, applied.run))
        _about_to_commit()
    reached("txn.after_commit")
    return applied.run


def _lease(claim: RunClaimed) -> float:
    """Return the length of the lease in seconds. Both times come from the owner's clock, so its error cancels out."""
    return claim.lease_expires_at - datetime.fromisoformat(claim.at).timestamp()


async def _send_note(connection: Connection, run_id: str, note: Note) -> None:
    """Add the note to the run's inbox, and notify the owner. Raises Conflict, or an error of asyncpg."""
    async with connection.transaction():
        reached("txn.begun")
        if await _fetch_one(connection, tables.GET_LAST + _LOCK, run_id) is None:
            raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")
        number = await _fetch_one(connection, tables.NEXT_NOTE, run_id)
        expected = read_records.note_checksum(note.kind, note.task_id, note.body)
        row = run_id, number, note.at, note.kind, note.task_id, note.body, expected
        await _write_rows(connection, {tables.ADD_NOTE: [row]})
        # Here only: a NOTIFY takes a lock of the whole cluster at the commit, and would slow down every batch.
        await connection.execute("SELECT pg_notify($1, $2)", _CHANNEL, _payload(run_id))
        _about_to_commit()
    reached("txn.after_commit")


async def _purge(connection: Connection, run_ids: Sequence[str]) -> Purged:
    """See `PostgresStore.purge`."""
    async with connection.transaction():
        # No batch adds a reference to a text meanwhile: a batch adds the text too.
        await connection.execute("LOCK TABLE texts IN SHARE ROW EXCLUSIVE MODE")
        stored: list[str] = []
        refused: list[str] = []
        for run_id in dict.fromkeys(run_ids):
            for row in await _fetch(connection, f"{delete_runs.GET_OWNERSHIP} FOR UPDATE", (run_id,)):
                stored.append(run_id)
                refused += filter(None, [delete_runs.reason_to_keep(*row)])
        if refused:
            raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
        for run_id in stored:
            for statement in delete_runs.DELETE_RUN:
                await _fetch(connection, statement, (run_id,))
        await _fetch(connection, delete_runs.DELETE_UNUSED_TEXTS, ())
    remains = "the runs are deleted; the log, the backups and pages before the next VACUUM of the server keep copies"
    return delete_runs.Purged(tuple(stored), 0, remains if stored else None)


async def _run_sizes(connection: Connection) -> dict[str, int]:
    """See `PostgresStore.run_sizes`."""
    found = await connection.fetch(delete_runs.sizes_by_run("octet_length({})".format))
    return {run_id: int(size) for run_id, size in found}


# Notifications of notes. A lost notification only delays the note: the owner reads its inbox after LONGEST_WAIT_S
# seconds in any case.

_CHANNEL: Final = "plait_notes"
KEPT_RUNS: Final = 10_000
"""Number of runs, the last waited for, whose notifications are kept until the next `wait`."""
LONGEST_WAIT_S: Final = 5.0
"""Seconds after which `wait` returns without a notification: connections can be lost unseen."""
_RETRY_S: Final = 1.0


def _payload(run_id: str) -> str:
    """Return the text of a notification about the run. A payload is limited to 8,000 bytes, an id is not."""
    return str(crc32(run_id.encode()))


class Listener:
    """One connection that listens for the notes of all runs of a store. The first `wait` opens the connection."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._next_try = -math.inf
        """The time before which no connection is opened: a server may refuse each, or drop it at once."""
        self._arrived: OrderedDict[str, asyncio.Event] = OrderedDict()
        """An event for each run, by payload, the last waited for at the end. Set if a note may have arrived."""

    async def wait(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after `LONGEST_WAIT_S` seconds. The first call
        for a run, and the first call over a new connection, returns at once: earlier notes were not notified.
        """
        arrived = self._event_of(_payload(run_id))
        try:
            await self._listen()
        except Exception:
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

    async def _listen(self) -> None:
        async with self._lock:
            if self._connection is not None and not self._connection.is_closed():
                return
            await anyio.sleep(max(0.0, self._next_try - anyio.current_time()))
            self._next_try = anyio.current_time() + _RETRY_S
            connection = await connect(self._dsn)
            try:
                await connection.add_listener(_CHANNEL, self._notified)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
            self._wake_all()

    def _notified(self, _connection: Any, _pid: int, _channel: str, run: object) -> None:
        if arrived := self._arrived.get(str(run)):
            arrived.set()

    def _wake_all(self) -> None:
        for arrived in self._arrived.values():
            arrived.set()

    def close(self) -> None:
        """Drop the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
        self._wake_all()
