"""The slots of a host, shared by all host processes of the user: each slot is a lock on a file.

    <state>/slots/MACHINE/NUMBER        machines with one home folder have slots of their own

The system frees the lock of a process that is killed. An attempt that outlives its host process then holds no slot
until it is followed again.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from plait.backends.process.private import locked_file, private_folder


def slots_taken(state: Path) -> int:
    """Return the number of slots of this machine that any process holds."""
    return Slots(state, len(list(_slots_folder(state).iterdir()))).taken()


def _slots_folder(state: Path) -> Path:
    return private_folder(state / "slots" / platform.node())


class Slots:
    """The slots that this process holds on its host, of `count` slots with files below `state`."""

    def __init__(self, state: Path, count: int) -> None:
        self._folder = _slots_folder(state)
        self._count = count
        self._held: dict[str, tuple[int, int]] = {}
        """The number and the descriptor of the slot, by attempt."""

    def take(self, attempt: str) -> bool:
        """Take a slot for the attempt. Return False if all slots of the host are taken, also by other processes."""
        if attempt in self._held:
            return True
        ours = {number for number, _ in self._held.values()}
        for number in range(self._count):
            if number not in ours and (descriptor := self._lock(number)) is not None:
                self._held[attempt] = number, descriptor
                return True
        return False

    def free(self, attempt: str) -> None:
        """Free the slot of the attempt, if any."""
        held = self._held.pop(attempt, None)
        if held is not None:
            os.close(held[1])

    def taken(self) -> int:
        """Return the number of slots that any process holds."""
        ours = {number for number, _ in self._held.values()}
        return sum(number in ours or self._is_locked(number) for number in range(self._count))

    def _is_locked(self, number: int) -> bool:
        descriptor = self._lock(number)
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def _lock(self, number: int) -> int | None:
        """Return the descriptor of a slot; None if the slot is taken. Raise OSError if files cannot be locked."""
        try:
            return locked_file(self._folder / str(number), wait=False)
        except BlockingIOError:
            return None
