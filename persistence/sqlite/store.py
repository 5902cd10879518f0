"""The store in one SQLite file."""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from persistence.errors import StoreError
from persistence.sqlite import reading
from persistence.sqlite.opening import BUSY_TIMEOUT_S, Mode, open_database
from persistence.sqlite.thread import DatabaseThread
from persistence.sqlite.writing import write_batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from persistence.changes import Batch
    from persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord

P = ParamSpec("P")
T = TypeVar("T")

_HINTS = {
    sqlite3.SQLITE_FULL: "free some space; nothing of the batch was kept, and it can be written again",
    sqlite3.SQLITE_IOERR: "check the disk; the batch can be written again",
    sqlite3.SQLITE_BUSY: f"another process has been writing for {BUSY_TIMEOUT_S:g} s; try again",
    sqlite3.SQLITE_READONLY: "check the permissions of the file and of its directory",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy",
}


class SQLiteStore:
    """Keeps runs in the SQLite file at `path`, through crashes and power losses. Fulfils `Store`; asyncio only.

    Use it as an async context manager; outside of it every call raises StoreError. Entering raises StoreUnusable when
    the file cannot be used, and then has changed nothing. `mode` says what may happen to the file:

    - `"create"`: open it, or make it (mode 0600, in a directory made with 0700) where there is none.
    - `"existing"`: open it; a missing file is an error. For going on with a run.
    - `"read"`: only read, also while another process writes. `write` raises StoreError.

    Several processes may share one file, each with a store of its own. A store can be opened again after it was closed.
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

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise StoreError(f"the store {self.path} is open already; use one object for each opening")
        self._thread = await DatabaseThread.start(partial(open_database, self.path, self.mode))
        self._file = self._identity()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what was asked for and close the file. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    async def write(self, batch: Batch) -> None:
        if self.mode == "read":
            raise StoreError(f"the store {self.path} was opened for reading only; open it with mode 'existing'")
        if self._identity() != self._file:
            # SQLite would go on writing into the removed file, and every write would succeed.
            raise StoreError(f"the store {self.path} was removed or replaced while in use; put it back, or start again")
        await self._call(write_batch, batch)

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._call(reading.read, reading.get_run, run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._call(reading.read, reading.list_runs, limit)

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        return await self._call(reading.read, reading.list_tasks, run_id)

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self._call(reading.read, reading.list_attempts, run_id, task_id)

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self._call(reading.read, reading.list_messages, run_id, task_id)

    async def list_events(self, run_id: str, after: int = 0, limit: int = 1000) -> tuple[EventRecord, ...]:
        return await self._call(reading.read, reading.list_events, run_id, after, limit)

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    async def _call(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        thread = self._thread
        if thread is None:
            raise StoreError(f"the store {self.path} is not open; use it inside `async with`")
        try:
            return await thread.run(function, *args, **kwargs)
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _explained(self, error: sqlite3.Error) -> StoreError:
        code: int | None = getattr(error, "sqlite_errorcode", None)
        hint = None if code is None else _HINTS.get(code & 0xFF)
        return StoreError(f"the store {self.path} failed: {error}" + (f"; {hint}" if hint else ""))
