"""Make files and folders for this user alone, and lock files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Make `folder` and its missing parents for this user alone, and return `folder`."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder


def private_file(path: Path, text: str) -> None:
    """Write a file for this user alone, in place of an older file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def locked_file(path: Path, *, wait: bool) -> int:
    """Make the file for this user alone if it is missing, and lock it. Return the descriptor: closing it unlocks.

    Raise BlockingIOError if another descriptor has the lock and the call is not to `wait`. Raise another OSError, with
    the path in its text, if the file cannot be locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        advice = "set XDG_STATE_HOME there to a folder on a local disk"
        raise OSError(f"this host cannot lock files in {path.parent}: {error.strerror}; {advice}") from error
    return descriptor
