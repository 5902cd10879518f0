"""Locks on the folders in which programs write: one writer at a time, whichever run or process has started it.

The lock is one of the operating system, on the folder itself. A program inherits it, so it lasts as long as the last of
the program, its tools and the process that has taken it. Inside a checkout of git, a folder counts with the folders
around and within it; two folders side by side do not.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

HELD = "PLAIT_FOLDER_"
"""The beginning of the variable that names the folder of a program to a plait within it: that one does not wait for the
program that waits for it. A folder around it is not the program's: others may work there beside it.
"""
_TAKEN: set[str] = set()
"""The folders that this process has taken without a lock of the system: its caller has it, or there are no locks."""


class FolderLock:
    """A lock on a folder, with copies of its descriptors in the programs that have inherited them."""

    def __init__(self, descriptors: Sequence[int], taken: str | None = None) -> None:
        self.descriptors = tuple(descriptors)
        """Those of the folders around the locked one, and its own, the last."""
        self._taken = taken

    def close(self) -> None:
        """Give the lock back, as far as no program has it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()
        if self._taken is not None:
            _TAKEN.discard(self._taken)


def lock_folder(folder: Path) -> FolderLock | None:
    """Lock a folder for one writer, without waiting. Return None if another one has it, or a folder around or within.

    A folder that is missing, or that this user may not read, is not locked.
    """
    real, descriptors, name = Path(os.path.realpath(folder)), list[int](), None
    try:
        for each in (*_around(real), real):
            descriptors.append(os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            own = _name_of(descriptors[-1])
            if own in os.environ or not _lock(descriptors[-1], fcntl.LOCK_EX if each == real else fcntl.LOCK_SH):
                name = own if each == real else name
        if name in _TAKEN:
            raise BlockingIOError
    except OSError as error:
        FolderLock(descriptors).close()
        return None if isinstance(error, BlockingIOError) else FolderLock(())
    if name is not None:
        _TAKEN.add(name)
    return FolderLock(descriptors, name)


def _lock(descriptor: int, kind: int) -> bool:
    """Return whether the file system has locks. Raise BlockingIOError if another one has this one."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _around(folder: Path) -> Iterator[Path]:
    """Yield the folders around `folder` in its checkout of git, the checkout first."""
    if (folder / ".git").exists():
        return
    for depth, each in enumerate(folder.parents):
        if (each / ".git").exists():
            yield from reversed(folder.parents[: depth + 1])
            return


def name_held(descriptors: Sequence[int]) -> dict[str, str]:
    """Return the variable that names the folder of a program, given the `descriptors` of its lock."""
    return {_name_of(descriptors[-1]): "1"}


def _name_of(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{HELD}{found.st_dev:x}_{found.st_ino:x}"
