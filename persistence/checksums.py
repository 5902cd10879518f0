"""CRC-32 over what was asked and what was answered, and the digests of large texts."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final
from zlib import crc32

from plait.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGE: Final = 64 * 1024
SHORT: Final = _LARGE // 4
"""The number of characters of a text that is never large, because a character takes four bytes at most."""


def damaged(run_id: str, what: str) -> StoreError:
    return StoreError(
        f"run {run_id!r} is damaged: {what} does not fit its checksum; restore a copy of the store, or start a new run"
    )


def checksum(owner: str, text: str | None, more: str | None = None) -> int:
    """Return the CRC-32 of the text, and of more, that belong to the task or run `owner`."""
    if len(text or "") + len(more or "") <= SHORT:
        whole = f"{owner}\0{text}" if more is None else f"{owner}\0{text}\0{len(more)}\0{more}"
        return crc32(whole.encode())
    rest = ("",) if more is None else (f"\0{len(more)}\0", more)
    value = 0
    for part in (f"{owner}\0", str(text), *rest):
        for piece in _encoded(part):
            value = crc32(piece, value)
    return value


def digest(text: str) -> bytes | None:
    """Return the key in `texts` of a large text; None for a text that belongs into its row."""
    if len(text) <= SHORT or (len(text) <= _LARGE and len(text.encode()) <= _LARGE):
        return None
    value = sha256()
    for piece in _encoded(text):
        value.update(piece)
    return value.digest()


def _encoded(text: str) -> Iterator[bytes]:
    """Yield the text in pieces, because a copy of a large text needs as much memory again."""
    for start in range(0, len(text), SHORT):
        yield text[start : start + SHORT].encode()
