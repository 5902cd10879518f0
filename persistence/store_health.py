"""Checks of the SQLite library, of a place and of a file for their fitness as a store.

Nothing is created or repaired, and only SQLite opens the file, for reading. SQLite leaves an empty WAL and the index of
the WAL beside the file, as after every read.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from plait.errors import StoreError, StoreUnusable
from plait.persistence import read_records, tables
from plait.persistence.findings import MOST_NAMED, Finding, Fitness, checksums
from plait.persistence.sqlite_file import (
    OLDEST_SQLITE,
    check_tables,
    decode_lossy,
    open_database,
    page_damage,
    repair_advice,
    unfinished_files,
    wal_path,
)
from plait.persistence.sqlite_store import read_on

if TYPE_CHECKING:
    from collections.abc import Iterator

_WAL_RESET_BUG: Final = (((3, 7, 0), (3, 44, 6)), ((3, 45, 0), (3, 50, 7)), ((3, 51, 0), (3, 51, 3)))
"""The versions with the bug, from each first version to before the second. Two connections that write and checkpoint
at the same moment may lose committed rows, or the whole file.
"""
_LARGE_WAL: Final = 64 << 20  # bytes; about 8 MiB is usual
_LITTLE_SPACE: Final = 100_000_000  # bytes
_EVENTS_AT_ONCE: Final = 1000


def library(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> Finding:
    """Check that SQLite `version` is new enough, and has not the WAL-reset bug."""
    name = ".".join(map(str, version))
    if version < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE[:2]))
        return Finding("sqlite", Fitness.BAD, f"{name} is too old", f"use a Python with SQLite {oldest} or later")
    if any(first <= version < fixed for first, fixed in _WAL_RESET_BUG):
        return Finding(
            "sqlite",
            Fitness.WARNING,
            f"{name} has the WAL-reset bug: in rare cases two processes that write to one file lose committed data",
            "let one process at a time write to a store, or use a Python with SQLite 3.51.3, 3.50.7 or 3.44.6",
        )
    return Finding("sqlite", Fitness.OK, name)


_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
     "orangefs", "pvfs2", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs",
     "fuse.rclone", "fuse.gcsfuse", "fuse.davfs", "fuse.cifs", "fuse.juicefs", "fuse.goofys", "fuse.mountpoint-s3"}
)  # fmt: skip
# A folder of the host, shared by a hypervisor: no shared memory between host and guest.
_SHARED: Final = frozenset({"9p", "virtiofs", "vboxsf", "vmhgfs", "fuse.vmhgfs-fuse", "prl_fs", "drvfs"})
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def file_system(path: Path, mountinfo: str | None) -> Finding:
    """Check that a store at `path` lies on a local disk, because all users of a store in WAL mode share memory.

    `mountinfo` is the text of /proc/self/mountinfo, or None on other systems than Linux.
    """
    kind = file_system_type(path.resolve(), mountinfo or "")
    name, local = "file system", "put the store on a local disk with --store"
    if kind in _NETWORK:
        return Finding(
            name, Fitness.BAD, f"{kind} is a network file system; it lacks the memory that WAL shares", local
        )
    if kind in _SHARED:
        return Finding(name, Fitness.BAD, f"{kind} is a folder shared with another system; WAL is unsafe there", local)
    if kind in _IN_MEMORY:
        return Finding(name, Fitness.WARNING, f"{kind} is gone when this machine stops", local)
    if not kind or kind.startswith("fuse"):
        found = f"unknown file system {kind}" if kind else "cannot tell"
        return Finding(name, Fitness.OK, found, "make sure that the store is on a local disk")
    return Finding(name, Fitness.OK, kind)


def file_system_type(path: Path, mountinfo: str) -> str:
    """Return the type of the file system of `path`, or an empty text if unknown.

    `path` is absolute and without links; `mountinfo` is the text of /proc/self/mountinfo.
    """
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), columns[4])
        # A later line hides an earlier line with the same mount point.
        if len(point) >= best and path.is_relative_to(point):
            best, kind = len(point), rest.split(" ")[0]
    return kind


def space(folder: Path) -> Finding:
    """Check that the existing `folder` has free space."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("space", Fitness.WARNING, f"cannot tell: {error.strerror}")
    shown = f"{free / 1e6:,.0f} MB free"
    if free < _LITTLE_SPACE:
        return Finding("space", Fitness.WARNING, shown, "free some; with a full store a run continues unrecorded")
    return Finding("space", Fitness.OK, shown)


def permissions(path: Path) -> Iterator[Finding]:
    """Check that only this user can read the store at `path`, its WAL and its directory."""
    found = [_folder_trouble(path.parent), *(_file_trouble(_beside(path, end)) for end in ("", "-wal", "-shm"))]
    troubles = [Finding("permissions", Fitness.WARNING, *one) for one in found if one is not None]
    yield from troubles or [Finding("permissions", Fitness.OK, "no other user may read the store")]


def _folder_trouble(folder: Path) -> tuple[str, str] | None:
    elsewhere = "keep the store in a directory of its own"
    user, mode = _user_and_mode(folder)
    if user not in (None, os.geteuid()):
        return f"{folder} belongs to user {user}, this is user {os.geteuid()}", elsewhere
    if mode & 0o077:
        return f"{folder} is open to others (mode {mode:04o})", f"chmod 700 {quote(str(folder))}, or {elsewhere}"
    return None


def _file_trouble(file: Path) -> tuple[str, str] | None:
    user, mode = _user_and_mode(file)
    if user is None:
        return None
    if user != os.geteuid():
        return f"{file} belongs to user {user}, this is user {os.geteuid()}", "use the store as its owner"
    if mode & 0o077:
        return f"{file} is open to others (mode {mode:04o})", f"chmod 600 {quote(str(file))}"
    if not os.access(file, os.R_OK | os.W_OK):
        return f"{file} may not be read and written", f"chmod 600 {quote(str(file))}"
    return None


def _user_and_mode(file: Path) -> tuple[int | None, int]:
    try:
        found = file.stat()
    except OSError:
        return None, 0
    return found.st_uid, stat.S_IMODE(found.st_mode)


def file(path: Path) -> Iterator[Finding]:
    """Check the pages and the checksums of the store at `path`. Stop at an error that makes the file unreadable."""
    try:
        connection = open_database(path, "read", look_for_damage=False)
    except StoreUnusable as error:
        yield Finding("file", Fitness.BAD, str(error))
        return
    with closing(connection):
        connection.text_factory = decode_lossy  # bytes that are no text fit no checksum, which reports the record
        yield Finding("schema", Fitness.OK, f"format {tables.FORMAT}")  # another format cannot be opened
        try:
            yield _pages(path, connection)
            yield from _structure(path, connection)
            yield _rows(connection)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite may quote a damaged page
            yield Finding("file", Fitness.BAD, f"{path} cannot be read: {error}", repair_advice(path))
            return
    yield _wal(path)


def leftovers(path: Path) -> Iterator[Finding]:
    """Report unfinished files that a crash at the first start has left beside `path`."""
    try:
        names = [one.name for one in unfinished_files(path)]
    except OSError:  # the folder is missing or not readable, which other checks report
        return
    if names:
        what = f"{len(names)} unfinished by an interrupted start: {', '.join(names[:MOST_NAMED])}"
        yield Finding("left over", Fitness.WARNING, what, "a run that starts an hour later removes them")


def _beside(path: Path, end: str) -> Path:
    return Path(f"{path.resolve()}{end}")


def _pages(path: Path, connection: sqlite3.Connection) -> Finding:
    damage = page_damage(connection)
    if not damage:
        return Finding("pages", Fitness.OK, "whole")
    return Finding("pages", Fitness.BAD, f"damaged: {damage}", f"{repair_advice(path)}; no run can be resumed before")


def _structure(path: Path, connection: sqlite3.Connection) -> Iterator[Finding]:
    try:
        check_tables(path, connection)
    except StoreUnusable as error:
        yield Finding("file", Fitness.BAD, str(error))


def _rows(connection: sqlite3.Connection) -> Finding:
    results = messages = 0
    damaged: list[str] = []
    for (run_id,) in connection.execute(tables.LIST_RUN_IDS).fetchall():
        try:
            _check_run(connection, run_id)
            # Task by task: a run of a million tasks takes the memory of one.
            for (task_id,) in connection.execute(tables.LIST_TASK_IDS, (run_id,)):
                (task,) = read_on(connection, read_records.list_tasks, run_id, task_id)
                talk = read_on(connection, read_records.list_messages, run_id, task_id)
                results += task.status == "completed"
                messages += len(talk)
                if task.damaged or any(message.damaged for message in talk):
                    damaged.append(f"{run_id}/{task_id}")
        except StoreError as error:
            damaged.append(str(error).split(";", maxsplit=1)[0])
    return checksums(damaged, results, messages)


def _check_run(connection: sqlite3.Connection, run_id: str) -> None:
    """Read the run, its notes and its events. Raises StoreError if one is damaged."""
    read_on(connection, read_records.get_run, run_id)
    read_on(connection, read_records.list_notes, run_id, 0)
    last = 0
    while events := read_on(connection, read_records.list_events, run_id, last, _EVENTS_AT_ONCE, None):
        last = events[-1].seq


def _wal(path: Path) -> Finding:
    try:
        size = wal_path(path).stat().st_size
    except OSError:
        size = 0
    shown = f"{size / 1e6:,.1f} MB"
    if size > _LARGE_WAL:
        advice = "end the processes that read the store for long; the next write then shrinks the WAL"
        return Finding("wal", Fitness.WARNING, shown, advice)
    return Finding("wal", Fitness.OK, shown)
