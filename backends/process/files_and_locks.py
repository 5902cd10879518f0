"""Files and folders for this user alone: made, replaced as a whole, locked; and locks on the folders in which programs
write: one writer at a time, whichever run or process has started it.

The lock on a folder is one of the operating system, on the folder itself. A program inherits it, so it lasts as long as
the last of the program, its tools and the process that has taken it. Inside a checkout of git, a folder counts with the
folders around and within it; two folders side by side do not.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Make `folder` and its missing parents for this user alone, and return `folder`."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder


def private_file(path: Path, text: str, *, durably: bool = False) -> None:
    """Write a file for this user alone, in place of an older file; `durably` if it has to survive a loss of power."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if durably:
            file.flush()
            os.fsync(descriptor)


def replace_file(path: Path, text: str, *, durably: bool = False) -> None:
    """Write a file for this user alone, whole or not at all, whoever reads it or is killed meanwhile."""
    new = path.with_suffix(f".{os.getpid()}.new")
    private_file(new, text, durably=durably)
    new.replace(path)


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file until the last copy of the descriptor is closed. Return False if another process has the lock.

    Raise OSError on a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Make the file for this user alone if it is missing, and lock it. Return the descriptor: closing it unlocks.

    Return None if another descriptor has the lock and the call is not to `wait`. Raise OSError, with the path in its
    text, if the file cannot be locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if lock(descriptor, wait=wait):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        raise _without_locks(path, error) from error
    os.close(descriptor)
    return None


def is_locked(path: Path) -> bool:
    """Return whether a process has locked the file; False for a missing file. Raise OSError as `lock_file`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not hinder each other
    except BlockingIOError:
        return True
    except OSError as error:
        raise _without_locks(path, error) from error
    finally:
        os.close(descriptor)
    return False


def _without_locks(path: Path, error: OSError) -> OSError:
    advice = "set XDG_STATE_HOME there to a folder on a local disk"
    return OSError(f"this host cannot lock files in {path.parent}: {error.strerror}; {advice}")


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
    file_stat = os.fstat(descriptor)
    return f"{HELD}{file_stat.st_dev:x}_{file_stat.st_ino:x}"
