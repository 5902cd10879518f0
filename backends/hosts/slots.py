"""The slots of a host, shared by all host processes of the user: each slot is a lock on a file.

The system frees the lock of a process that is killed. An attempt that outlives its host process then holds no slot
until it is followed again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from plait.backends.process.private import private_folder


def slots_taken(folder: Path) -> int:
    """Return the number of slots in `folder` that any process holds."""
    slots = Slots(folder, len(list(private_folder(folder).iterdir())))
    try:
        return slots.taken()
    finally:
        slots.close()


class Slots:
    """The slots that this process holds on its host."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = private_folder(folder)
        self._count = count
        self._held: dict[str, int] = {}
        """The number of the slot, by attempt."""
        self._ours: set[int] = set()
        """The numbers of the held slots."""
        self._files: dict[int, int] = {}
        """The descriptors of the files used so far, by number: they stay open."""

    def take(self, turn: str) -> bool:
        """Take a slot for the attempt. Return False if all slots of the host are taken, also by other processes."""
        if turn in self._held:
            return True
        for number in range(self._count):
            if number not in self._ours and self._lock(number):
                self._held[turn] = number
                self._ours.add(number)
                return True
        return False

    def free(self, turn: str) -> None:
        """Free the slot of the attempt, if any."""
        number = self._held.pop(turn, None)
        if number is not None:
            self._ours.remove(number)
            self._unlock(number)

    def taken(self) -> int:
        """Return the number of slots that any process holds."""
        return sum(number in self._ours or self._is_locked(number) for number in range(self._count))

    def close(self) -> None:
        """Free all slots."""
        for descriptor in self._files.values():
            os.close(descriptor)

    def _is_locked(self, number: int) -> bool:
        if not self._lock(number):
            return True
        self._unlock(number)
        return False

    def _lock(self, number: int) -> bool:
        descriptor = self._files.get(number)
        if descriptor is None:
            descriptor = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._files[number] = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # taken, or a file system without locks
            return False
        return True

    def _unlock(self, number: int) -> None:
        fcntl.flock(self._files[number], fcntl.LOCK_UN)
