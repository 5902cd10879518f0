"""PostgresStore: runs in a PostgreSQL database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from plait.persistence.address import SCHEMES, masked
from plait.persistence.errors import Conflict, Gap, StoreError, StoreNotOpen, StoreRefused, StoreUnusable
from plait.persistence.postgres import purge, reader
from plait.persistence.postgres.connection import (
    ReconnectingConnection,
    connect,
    explained,
    obstacle,
    prepare,
    require_driver,
)
from plait.persistence.postgres.listener import Listener
from plait.persistence.postgres.writer import BatchCounts, send_note, write_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection
    from types import TracebackType

    from plait.persistence.changes import Batch
    from plait.persistence.old_tables.purged import Purged
    from plait.persistence.postgres.connection import Connection, Mode
    from plait.persistence.postgres.writer import RunCache
    from plait.persistence.records import (
        AttemptRecord,
        EventKind,
        EventRecord,
        MessageRecord,
        Note,
        NoteRecord,
        RunRecord,
        TaskRecord,
    )

P = ParamSpec("P")
T = TypeVar("T")


class PostgresStore:
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
                f"a PostgresStore needs an address like postgresql://user@host/database, not {masked(dsn)!r}"
            )
        self.address = masked(dsn)
        """The address, with a password replaced by `***`."""
        self.mode: Mode = mode
        self._dsn = dsn
        self._writer: ReconnectingConnection | None = None
        self._reader: ReconnectingConnection | None = None
        self._listener: Listener | None = None
        self._runs: RunCache = {}
        self._store_id: str | None = None
        self.batches = BatchCounts()
        """The number of batches that were written."""
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
            connection = await connect(self._dsn)
        except Exception as error:
            # Without the cause, which may show the address with its password.
            why, advice = (
                explained(self._dsn, error),
                "; check the address, the password, and that the server is running",
            )
            advice = "" if isinstance(why, StoreRefused) else advice
            raise StoreUnusable(f"cannot open the store: {why}{advice}") from None
        try:
            self._store_id = await prepare(connection, self.mode, self.address)
            self.server_version = ".".join(map(str, connection.get_server_version()[:2]))
        except StoreError:
            connection.terminate()
            raise
        except BaseException as error:
            connection.terminate()
            if isinstance(error, Exception):
                raise StoreUnusable(f"cannot open the store: {explained(self._dsn, error)}") from None
            raise
        self._writer = ReconnectingConnection(self._dsn, connection)
        self._reader = ReconnectingConnection(self._dsn)
        self._listener = Listener(self._dsn)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            await self._write(write_batch, batch, self._runs, self.batches)
        except Gap:
            raise
        except Conflict as error:
            raise type(error)(_of_run(batch.run_id, error)) from None

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._read(reader.get_run, run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._read(reader.list_runs, limit)

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._read(reader.list_claimable, limit)

    async def list_tasks(self, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
        return await self._read(reader.list_tasks, run_id, task_id)

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self._read(reader.list_attempts, run_id, task_id)

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self._read(reader.list_messages, run_id, task_id)

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: EventKind | None = None
    ) -> tuple[EventRecord, ...]:
        return await self._read(reader.list_events, run_id, after, limit, kind)

    async def send(self, run_id: str, note: Note) -> None:
        try:
            await self._write(send_note, run_id, note)
        except Conflict as error:
            raise type(error)(_of_run(run_id, error)) from None

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return await self._read(reader.list_notes, run_id, after)

    async def wait_for_note(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, at the latest after 5 s."""
        if self._listener is None:
            raise StoreNotOpen(f"the store {self.address} is not open; use it inside `async with`")
        await self._listener.wait(run_id)

    async def silence(self, run_id: str) -> float:
        """Return the seconds since the last batch of the run, by the server's clock; 0 for an unknown run."""
        return await self._read(reader.silence, run_id)

    async def run_sizes(self) -> dict[str, int]:
        """Return the bytes of text by run id: prompts, results, messages, settings. Reads all tables."""
        return await self._read(purge.run_sizes)

    async def session_ids(self) -> set[str]:
        """Return the backends' session ids of all tasks in all runs."""
        return await self._read(reader.session_ids)

    async def purge(self, run_ids: Collection[str]) -> Purged:
        """Delete all of the runs.

        Raises Conflict, and deletes nothing, if a run has not ended (completed, failed or cancelled) or has an owner.
        Unknown ids are ignored. The server frees space by its own VACUUM. `Purged.remains` says where copies stay.
        """
        return await self._write(purge.purge, tuple(run_ids))

    async def obstacle(self) -> str | None:
        """Return why no run can be stored here, in one line with the remedy; None if runs can be stored. Opening the
        store in another mode than "read" raises StoreUnusable with the same line.
        """
        return await self._read(obstacle, self.address)

    async def warnings(self) -> tuple[str, ...]:
        """Return a line for each setting of the server under which acknowledged batches may be lost."""
        return await self._read(purge.durability_warnings)

    async def _write(
        self, function: Callable[Concatenate[Connection, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._writer is not None and self.mode == "read":
            raise StoreNotOpen(f"the store {self.address} was opened for reading only; open it with mode 'existing'")
        return await self._call(self._writer, function, *args, **kwargs)

    async def _read(
        self, function: Callable[Concatenate[Connection, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._call(self._reader, function, *args, **kwargs)

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
