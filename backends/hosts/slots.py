"""The slots of a host, shared by all host processes of the user: each slot is a lock on a file.

    <state>/slots/MACHINE/NUMBER        machines with one home folder have slots of their own

The system frees the lock of a process that is killed. An attempt that outlives its host process then holds no slot
until it is followed again.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from plait.backends.process.private_files import is_locked, lock_file, private_folder


def slots_taken(state: Path) -> int:
    """Return the number of slots of this machine that any process holds."""
    return Slots(state, len(list(_slots_folder(state).iterdir()))).taken()


def _slots_folder(state: Path) -> Path:
    return private_folder(state / "slots" / platform.node())


class Slots:
    """The slots that this process holds on its host, of `count` slots with files below `state`."""

    def __init__(self, state: Path, count: int) -> None:
        folder = _slots_folder(state)
        self._unheld = [folder / str(number) for number in range(count)]
        """The files of the slots that this process does not hold."""
        self._held: dict[str, tuple[Path, int]] = {}
        """The file and the descriptor of the slot, by attempt."""

    def take(self, attempt: str) -> bool:
        """Take a slot for the attempt. Return False if all slots of the host are taken, also by other processes."""
        if attempt in self._held:
            return True
        for file in self._unheld:
            if (descriptor := lock_file(file)) is not None:
                self._unheld.remove(file)
                self._held[attempt] = file, descriptor
                return True
        return False

    def free(self, attempt: str) -> None:
        """Free the slot of the attempt, if any."""
        held = self._held.pop(attempt, None)
        if held is not None:
            file, descriptor = held
            os.close(descriptor)
            self._unheld.insert(0, file)

    def taken(self) -> int:
        """Return the number of slots that any process holds."""
        return len(self._held) + sum(map(is_locked, self._unheld))
