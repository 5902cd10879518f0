"""CRC-32 over what was asked and what was answered, and the digests of large texts."""

from __future__ import annotations

from hashlib import sha256
from typing import Final
from zlib import crc32

from plait.errors import StoreError

_LARGE: Final = 64 * 1024
SHORT: Final = _LARGE // 4
"""The number of characters of a text that is never large, because a character takes four bytes at most."""


def damaged(run_id: str, what: str) -> StoreError:
    return StoreError(
        f"run {run_id!r} is damaged: {what} does not fit its checksum; restore a copy of the store, or start a new run"
    )


def checksum(owner: str, text: str | None, more: str | None = None) -> int:
    """Return the CRC-32 of the text, and of more, that belong to the task or run `owner`."""
    if more is None:
        return crc32(f"{owner}\0{text}".encode())
    return crc32(f"{owner}\0{text}\0{len(more)}\0{more}".encode())


def digest(text: str) -> bytes | None:
    """Return the key in `texts` of a large text; None for a text that belongs into its row."""
    if len(text) <= SHORT:
        return None
    encoded = text.encode()
    return sha256(encoded).digest() if len(encoded) > _LARGE else None
