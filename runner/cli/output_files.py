"""Writing of files for a person."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from plait.errors import InvalidRequest

_OPEN, _PRIVATE = 0o666, 0o600


def write_file(path: Path, text: str, *, private: bool) -> None:
    """Write `text` to `path`, whole or not at all, also through a crash. A `private` file is readable by its owner
    only, under any umask. An existing file is replaced. Raises InvalidRequest.
    """
    target = path.resolve()  # a symbolic link stays, and its target is replaced
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")
    try:
        _write(fresh, text, _PRIVATE if private else _OPEN)
        fresh.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - the mode holds from the first byte
        if mode == _PRIVATE:
            path.chmod(mode)  # the umask may have removed the rights of the owner
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power loss, if the file system can sync folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
