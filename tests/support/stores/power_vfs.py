"""The disk under a real store, recorded: every write, sync, truncation, removal and new name, in order.

The store and the runner are the real ones. Only `sqlite3.connect` gives, for a while, a connection of apsw's with the
few methods that the store uses, because apsw lets a file system be written in Python. It carries its own SQLite.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import apsw

from plait.persistence import Batch


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes handed to the disk; they may stay in its cache."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    file: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """All of the file's bytes so far are on the disk."""

    file: int


@dataclass(frozen=True, slots=True)
class Entry:
    """From now on `name` means that file, or none."""

    name: str
    file: int | None


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """All names so far are on the disk."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The store was handed a batch, which may be there from now on."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The oldest batch that was begun and not acknowledged is promised from now on."""


Operation: TypeAlias = Write | Truncate | Sync | Entry | SyncFolder | Begun | Acknowledged


@dataclass(slots=True, eq=False)
class Recording:
    """What happened to the files in one folder. Files are numbered; two names may mean the same one."""

    operations: list[Operation] = field(default_factory=list[Operation])
    files: dict[str, int] = field(default_factory=dict[str, int])
    numbers: count[int] = field(default_factory=count)
    replaced: set[str] = field(default_factory=set[str])
    """Statements that were asked for and replaced."""

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def found(self, path: Path) -> None:
        """The file at `path` was there before, safe on the disk."""
        file = self.opened(str(path))
        for operation in (Write(file, 0, path.read_bytes()), Sync(file), SyncFolder()):
            self.add(operation)

    def name(self, path: str | os.PathLike[str], file: int | None) -> None:
        """`path` means `file` from now on."""
        name = os.path.basename(path)  # noqa: PTH119 - of whatever SQLite passes
        if file is None:
            self.files.pop(name, None)
        else:
            self.files[name] = file
        self.add(Entry(name, file))

    def opened(self, path: str) -> int:
        """The number of the file at `path`."""
        known = self.files.get(os.path.basename(path))  # noqa: PTH119
        if known is None:
            known = next(self.numbers)
            self.name(path, known)
        return known


_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


class _File(apsw.VFSFile):
    """A file that tells what is done to it."""

    def __init__(self, recording: Recording, path: str, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._recording = recording
        self._number = recording.opened(path)
        self._syncs_folder = bool(flags[0] & _JOURNALS)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - apsw's name
        super().xWrite(data, offset)  # pyright: ignore[reportUnknownMemberType]
        self._recording.add(Write(self._number, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        self._recording.add(Truncate(self._number, newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._recording.add(Sync(self._number))
        if self._syncs_folder:
            # What apsw cannot show: SQLite's own file system syncs the folder with a journal's or WAL's first sync.
            self._syncs_folder = False
            self._recording.add(SyncFolder())


class RecordingVFS(apsw.VFS):
    """The usual file system, with a record of what goes through. Registered under `vfs_name` until `unregister`."""

    def __init__(self, recording: Recording) -> None:
        self.vfs_name = f"recording-{id(recording):x}"
        self._recording = recording
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path is None:  # SQLite's own temporary file
            return apsw.VFSFile("", name, flags)
        return _File(self._recording, path, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._recording.name(filename, None)
        if syncdir:
            self._recording.add(SyncFolder())


class _Connection:
    """What the store uses of `sqlite3.Connection`, over apsw's."""

    def __init__(self, uri: str, vfs_name: str, recording: Recording, instead: Mapping[str, str]) -> None:
        self._recording = recording
        self._instead = instead
        self._reads_only = "mode=ro" in uri
        flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE
        with _translated():
            self._connection = apsw.Connection(uri, flags=flags, vfs=vfs_name, statementcachesize=256)
            self._connection.set_busy_timeout(5000)
        self.text_factory: Any = str

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, sql: str, values: Sequence[Any] = ()) -> _Cursor:
        if sql in self._instead:
            self._recording.replaced.add(sql)
            sql = self._instead[sql]
        with _translated():
            rows: list[tuple[Any, ...]] = list(self._connection.execute(sql, values))  # pyright: ignore[reportUnknownMemberType]
            return _Cursor(rows, self._connection.changes())

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> _Cursor:
        return _Cursor([], sum(self.execute(sql, values).rowcount for values in rows))

    def close(self) -> None:
        # The last reader asks for a lock that it cannot have. SQLite shrugs at that, apsw tells of it all the same.
        with suppress(apsw.IOError) if self._reads_only else _translated():
            self._connection.close()


@dataclass(slots=True)
class _Cursor:
    rows: list[tuple[Any, ...]]
    rowcount: int

    def fetchone(self) -> tuple[Any, ...] | None:
        return self.rows.pop(0) if self.rows else None

    def fetchall(self) -> list[tuple[Any, ...]]:
        rows, self.rows = self.rows, []
        return rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.fetchall())


@contextmanager
def _translated() -> Generator[None]:
    """apsw's errors as those of the standard library."""
    try:
        yield
    except apsw.ConstraintError as error:
        raise sqlite3.IntegrityError(str(error)) from error
    except apsw.Error as error:
        translated = sqlite3.OperationalError(str(error))
        translated.sqlite_errorcode = getattr(error, "extendedresult", 0)
        raise translated from error


@contextmanager
def recorded(recording: Recording, instead: Mapping[str, str]) -> Generator[None]:
    """While this is open, stores that are opened in this process go through `recording`; where they execute a statement
    that `instead` names, the other one is executed.
    """
    vfs = RecordingVFS(recording)
    link, unlink, fsync = os.link, os.unlink, os.fsync

    def connect(database: str, **_options: Any) -> _Connection:
        return _Connection(database, vfs.vfs_name, recording, instead)

    def noted_link(source: Path, target: Path) -> None:
        link(source, target)
        recording.name(target, recording.files[source.name])

    def noted_unlink(path: Path) -> None:
        unlink(path)
        if path.name in recording.files:
            recording.name(path, None)

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            recording.add(SyncFolder())

    with (
        mock.patch.object(sqlite3, "connect", connect),
        mock.patch.object(os, "link", noted_link),
        mock.patch.object(os, "unlink", noted_unlink),
        mock.patch.object(os, "fsync", noted_fsync),
    ):
        yield
    vfs.unregister()
