"""The files of tasks on the disk: found and digested when a run is made, and read for an attempt.

The digest is part of the stored task. A file that has changed since is refused, so an attempt after a resume gets the
contents of the first attempt, and a stored run from elsewhere cannot make plait send the contents of other files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from plait.task import MAX_FILE_BYTES, TEXT, TaskFile, media_type


def find_file(path: Path) -> TaskFile:
    """Return the file at `path` with the digest of its contents. Raises ValueError for a file that cannot be used."""
    path = path.expanduser().absolute()
    data = _read(path)
    if media_type(str(path)) == TEXT:
        text_of_file(str(path), data)
    return TaskFile(str(path), hashlib.sha256(data).hexdigest())


def read_file(file: TaskFile) -> bytes:
    """Return the contents of `file`. Raises ValueError if they cannot be read, or are not those of the digest."""
    data = _read(Path(file.path))
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ValueError(f"the file {file.path} has changed since the run was made; put it back, or start a new run")
    return data


def text_of_file(path: str, data: bytes) -> str:
    """Return the contents `data` of the file at `path` as text. Raises ValueError for anything but text in UTF-8."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        kinds = "text in UTF-8, an image (.png, .jpg, .gif, .webp) or a PDF (.pdf)"
        raise ValueError(f"the file {path} is none of {kinds}; convert it")
    return text


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ValueError(f"there is no file {path}; check the path")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read ({error.strerror}); check its permissions") from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"the file {path} has more than {MAX_FILE_BYTES >> 20} MiB; make it smaller")
    return data
