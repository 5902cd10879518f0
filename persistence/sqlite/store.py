"""SQLiteStore: runs in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from plait.persistence.errors import StoreBusy, StoreError, StoreNotOpen
from plait.persistence.sqlite import purge, reader
from plait.persistence.sqlite.connection import BUSY_TIMEOUT_S, Mode, open_database
from plait.persistence.sqlite.thread import DatabaseThread
from plait.persistence.sqlite.wal import LogWatch
from plait.persistence.sqlite.writer import send_note, write_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import TracebackType

    from plait.persistence.changes import Batch
    from plait.persistence.delete_runs import Purged
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
    from plait.persistence.sqlite.writer import TaskCaches

P = ParamSpec("P")
T = TypeVar("T")

_HINTS = {
    sqlite3.SQLITE_FULL: "free some space",
    sqlite3.SQLITE_IOERR: "check the disk",
    sqlite3.SQLITE_BUSY: f"another process has been writing for {BUSY_TIMEOUT_S:g} s; try again",
    sqlite3.SQLITE_READONLY: "check the permissions of the file and of its directory",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy",
}


class SQLiteStore:
    """Keeps runs in the SQLite file at `path`, through crashes and power losses. Implements `Store`; asyncio only.

    An async context manager; outside of the block every call raises StoreError. Entering raises StoreUnusable if the
    file cannot be used, and then has changed nothing. A closed store can be entered again. The modes:

    - `"create"`: open the file, or create a missing file (mode 0600, in a directory created with 0700).
    - `"existing"`: open the file; a missing file is an error. For continuing a run.
    - `"read"`: only read, even while another process writes. `write` raises StoreNotOpen.

    Several processes may share a file, each with its own store.

    A `write` that raised because of the disk (full, failing, read-only, damaged) is *unknown*: the file holds the whole
    batch or nothing, and the next opening may decide, because SQLite cannot know whether a commit that failed during a
    flush has reached the disk. No change is ever added to an unknown transaction: the next call gets a new connection
    to the same file, and writing the same batch again resolves the doubt. If opening a connection fails, calls raise
    StoreError, and each call tries again. Acknowledged batches stay.
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: Mode = "create") -> None:
        if mode not in {"create", "existing", "read"}:
            raise ValueError(f"a store's mode is 'create', 'existing' or 'read', not {mode!r}")
        if os.fspath(path) in {"", ":memory:"}:
            raise ValueError(f"a SQLiteStore needs the path of a file, not {os.fspath(path)!r}; see MemoryStore")
        self.path = Path(path).absolute()
        self.mode: Mode = mode
        self._thread: DatabaseThread | None = None
        self._file: tuple[int, int] | None = None
        self._log: LogWatch | None = None
        self._caches: TaskCaches = {}

    @property
    def files_root(self) -> Path:
        """The folder beside the real database file, named like the file with `.files` added; see FilesStore."""
        real = self.path.resolve()
        return real.parent / f"{real.name}.files"

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise StoreError(f"the store {self.path} is open already; use one object for each opening")
        self._file = None
        self._thread = await DatabaseThread.start(self._connect)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish all calls and close the file. A second call does nothing."""
        thread, self._thread = self._thread, None
        self._caches = {}
        if thread is not None:
            await thread.stop()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    async def write(self, batch: Batch) -> None:
        self._check_writable()
        await self._call(self._write, write_batch, batch, self._caches)

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._call(reader.read, reader.get_run, run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._call(reader.read, reader.list_runs, limit)

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._call(reader.read, reader.list_claimable, limit)

    async def list_tasks(self, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
        return await self._call(reader.read, reader.list_tasks, run_id, task_id)

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self._call(reader.read, reader.list_attempts, run_id, task_id)

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self._call(reader.read, reader.list_messages, run_id, task_id)

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: EventKind | None = None
    ) -> tuple[EventRecord, ...]:
        return await self._call(reader.read, reader.list_events, run_id, after, limit, kind)

    async def send(self, run_id: str, note: Note) -> None:
        self._check_writable()
        await self._call(self._write, send_note, run_id, note)

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return await self._call(reader.read, reader.list_notes, run_id, after)

    async def run_sizes(self) -> dict[str, int]:
        """Return the bytes of text by run id: prompts, results, messages, settings. Reads the whole file.

        A large text is stored once, but counts in every run that holds the text.
        """
        return await self._call(purge.run_sizes)

    async def session_ids(self) -> set[str]:
        """Return the backends' session ids of all tasks in all runs."""
        return await self._call(purge.session_ids)

    async def purge(self, run_ids: Collection[str]) -> Purged:
        """Delete all of the runs, so that no byte of the runs is left in the file or in the WAL.

        Raises Conflict, and deletes nothing, if a run has not ended (completed, failed or cancelled) or has an owner.
        Raises StoreError like `write`. Unknown ids are ignored. A cancelled call is still finished.

        After the deletion the file is written anew, which takes time and free space in proportion to the rest; other
        writers wait meanwhile. If another process prevents the writing, `Purged.remains` has the reason.
        """
        self._check_writable()
        return await self._call(self._write, purge.purge, tuple(run_ids))

    def _write(
        self,
        connection: sqlite3.Connection,
        function: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return the result of `function`, which writes, if the log is whole before and after."""
        log = self._log
        assert log is not None
        log.check(connection)
        result = function(connection, *args, **kwargs)
        log.note_write()
        return result

    def _check_writable(self) -> None:
        if self.mode == "read":
            raise StoreNotOpen(f"the store {self.path} was opened for reading only; open it with mode 'existing'")
        if self._thread is not None:  # a store that is not open raises in `_call`
            self._check_identity()

    def _connect(self, look_for_damage: bool) -> sqlite3.Connection:
        """Return the first connection, or a new connection to the same file. Runs on the thread."""
        if self._file is None:
            connection = open_database(self.path, self.mode)
            self._file = self._identity()
            if self.mode != "read":
                self._log = LogWatch(self.path.resolve())
            return connection
        self._check_identity()
        return open_database(self.path, "read" if self.mode == "read" else "existing", look_for_damage=look_for_damage)

    def _check_identity(self) -> None:
        if self._identity() != self._file:
            # SQLite would write into the removed file, or the log beside an empty one, and every write would succeed.
            raise StoreError(
                f"the store {self.path} was removed or replaced, or emptied, while in use; put it back, or start again"
            )

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if found.st_size else None

    async def _call(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        thread = self._thread
        if thread is None:
            raise StoreNotOpen(f"the store {self.path} is not open; use it inside `async with`")
        try:
            return await thread.run(function, *args, **kwargs)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> StoreError:
        code: int | None = getattr(error, "sqlite_errorcode", None)
        hint = None if code is None else _HINTS.get(code & 0xFF)
        kind = StoreBusy if code is not None and code & 0xFF == sqlite3.SQLITE_BUSY else StoreError
        return kind(f"the store {self.path} failed: {error}" + (f"; {hint}" if hint else ""))
