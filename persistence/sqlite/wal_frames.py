"""Check the frames of the write-ahead log (WAL): SQLite ignores a damaged frame and all frames behind it in silence.

Theory: the log is a header and frames of 24 bytes and a page each. A checksum runs through the header and all frames; a
frame of another generation of the log has other salts. SQLite takes the first frame that does not fit for the end of
the log. The log of a process that was killed ends so too, and after a power loss the last transaction, which was never
acknowledged, may not fit. But a transaction is written only after the sync of the transaction before. So a frame that
does not fit is damage, if behind it a commit has a successor, a frame whose checksum continues the commit's. Else the
last transaction is in doubt. (Frames of a commit that failed do not continue each other's commits.)

The log is no file with locks, so reading the log does not drop the locks of SQLite (see connection.py).
"""

from __future__ import annotations

import os
import struct
from enum import Enum
from shlex import quote
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from plait.persistence.sqlite.wal import wal_path
from plait.persistence.sqlite.wal_checksum import log_checksum

if TYPE_CHECKING:
    from pathlib import Path

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_MAGIC: Final = 0x377F0682
"""The last bit is set if the checksums are of big-endian words."""
_ATTEMPTS: Final = 5


DOUBT: Final = (
    "the last change in the log does not fit its checksum and is ignored: a crash cut the change off before it was "
    "acknowledged, or the change is damaged"
)
"""The report on a log in doubt."""


class LogState(Enum):
    """The state of a log."""

    WHOLE = "whole"
    IN_DOUBT = "in doubt"
    """The last transaction does not fit its checksums: unfinished at a crash, or damaged. SQLite ignores it."""
    DAMAGED = "damaged"
    """Acknowledged transactions do not fit their checksums. SQLite ignores them."""


def damaged_log(path: Path) -> str:
    """Return the report on the damaged log of the database at `path`."""
    return f"{wal_path(path)} is damaged: stored changes do not fit their checksums, so SQLite would ignore them"


def restore_log(path: Path) -> str:
    """Return the remedy for the damaged log of the database at `path`."""
    lose = f"sqlite3 {quote(str(path))} 'PRAGMA wal_checkpoint(TRUNCATE)'"
    return f"restore a copy of {path.name} and {wal_path(path).name}, or lose the last changes with: {lose}"


def state_of_log(log: Path) -> LogState:
    """Return the state of the log. Another process may write meanwhile, so anything but WHOLE has to be seen twice."""
    before: _Seen | None = None
    for _ in range(_ATTEMPTS):
        try:
            with log.open("rb") as file:
                seen = _look(file)
        except FileNotFoundError:
            return LogState.WHOLE
        if seen.state is LogState.WHOLE or seen == before:
            return seen.state
        before = seen
    return LogState.WHOLE  # changes all the time, so its writer is alive and uses the log


class _Seen(NamedTuple):
    state: LogState
    header: bytes
    frame: bytes
    """The first frame that does not fit."""
    size: int


def _look(file: BinaryIO) -> _Seen:
    header, size = file.read(_HEADER.size), file.seek(0, os.SEEK_END)
    if size <= _HEADER.size or not any(header):  # a header of zeros was never synced, so no frame was
        return _Seen(LogState.WHOLE, header, b"", size)
    magic, _, page_size, _, *salts, sum_1, sum_2 = _HEADER.unpack(header)
    running, is_big = (sum_1, sum_2), bool(magic & 1)
    if magic & ~1 != _MAGIC or log_checksum((0, 0), header[:-8], is_big=is_big) != running:
        return _Seen(LogState.DAMAGED, header, b"", size)
    file.seek(_HEADER.size)
    while len(frame := file.read(_FRAME.size + page_size)) == _FRAME.size + page_size:
        _, _, *own_salts, sum_1, sum_2 = _FRAME.unpack_from(frame)
        found = running if own_salts != salts else _next(running, frame, is_big=is_big)
        if own_salts != salts or found != (sum_1, sum_2):
            fits_behind = _Behind(salts, is_big, found)
            return _Seen(fits_behind.state(file, frame), header, frame, size)
        running = found
    return _Seen(LogState.WHOLE, header, b"", size)


class _Behind:
    """The frames from the first that does not fit: `computed` is the checksum that this frame should have."""

    def __init__(self, salts: list[int], is_big: bool, computed: tuple[int, int]) -> None:
        self._salts = salts
        self._is_big = is_big
        self._computed = computed

    def state(self, file: BinaryIO, frame: bytes) -> LogState:
        """Return the state of the log. `frame` was read last."""
        state, size = LogState.WHOLE, len(frame)
        commits: list[tuple[int, int]] = []
        """The checksums that the successor of a commit may continue."""
        while len(frame) == size:
            _, commit, salt_1, salt_2, *sums = _FRAME.unpack_from(frame)
            stored = sums[0], sums[1]
            if any(_next(one, frame, is_big=self._is_big) == stored for one in commits):
                return LogState.DAMAGED
            # One salt alone is a damaged salt.
            if salt_1 == self._salts[0] or salt_2 == self._salts[1]:
                commits = [stored] if state is LogState.IN_DOUBT else [stored, self._computed]
                commits = commits if commit else []
                state = LogState.IN_DOUBT
            else:
                commits = []
            frame = file.read(size)
        return state


def _next(running: tuple[int, int], frame: bytes, *, is_big: bool) -> tuple[int, int]:
    """Return the checksum of a frame behind a frame with the checksum `running`."""
    running = log_checksum(running, frame[:8], is_big=is_big)
    return log_checksum(running, frame[_FRAME.size :], is_big=is_big)
