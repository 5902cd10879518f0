"""Files and folders for this user alone: made, replaced as a whole, locked."""

from __future__ import annotations

import fcntl
import os
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
