"""The checksums of the rows: they detect every changed column, and a row that stands in the place of another.

Theory: a bit that a disk or a memory has flipped in a text is invisible to SQLite. Every row therefore has a CRC-32
over all of its columns, ids included; a CRC-32 detects every burst of up to 32 bits. A prompt of an attempt, a result,
and settings have a checksum of their own, so that their damage is no damage to the row. A text in `blobs` counts as its
key, which is the SHA-256 of the text.

The checksums are a part of the cost of every task. SHA-256 took twice as long, and its 32 bytes took longer to bind
than a number. The numbers of the usual rows are packed, because writing a float as text takes as long as the checksum,
and columns that are usually NULL are left out while they are NULL, because writing None takes longer than a short text.
Elsewhere NULL is written as None or NaN; SQLite stores no NaN.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from math import nan as NAN  # noqa: N812 - a constant
from typing import Final, TypeAlias
from zlib import crc32

from plait.persistence.errors import StoreError

_START: Final = struct.Struct("<4q").pack
_END: Final = struct.Struct("<4q2d").pack
_PARTS: Final = struct.Struct("<4q").pack
_LOW: Final = 0xFFFFFFFF
_PIECE: Final = 1 << 16  # characters
WRONG_TYPES: Final = (TypeError, KeyError, AttributeError, struct.error)
"""The errors of a value of a type that its column does not allow; struct.error is of a packed number."""
Content: TypeAlias = str | bytes | None
"""A text, the key of a text in `blobs`, or NULL."""


def damaged(run_id: str, what: str) -> StoreError:
    """Return the error for a part of the run that does not fit its checksum."""
    return StoreError(
        f"run {run_id!r} is damaged: {what} does not fit its checksum; restore a copy of the store, or start a new run"
    )


def row_checksum(*row: object) -> int:
    """Return the CRC-32 of a row of another table."""
    return crc32(ascii(row).encode())


def start_checksum(
    start: int, task: int, attempt: int, backend: str, session_id: str | None, confirmed: int, at: str
) -> int:
    """Return the CRC-32 of a row of `starts`."""
    texts = f"{backend}\0{at}" if session_id is None else f"{backend}\0{at}\0{session_id}"
    return crc32(_START(start, task, attempt, confirmed) + texts.encode())


def end_checksum(
    start: int,
    end: int,
    status: str,
    at: str | None,
    tokens_in: int,
    tokens_out: int,
    cache_read: int,
    cache_write: int,
    reasoning: int,
    is_partial: int,
    cost: float | None,
    took: float | None,
    model: str | None,
    error_kind: str | None = None,
    error: str | None = None,
    question: str | None = None,
    asked: str | None = None,
) -> int:
    """Return the CRC-32 of a row of `ends`, without prompt, text and data."""
    packed = _END(start, end, tokens_in, tokens_out, NAN if cost is None else cost, NAN if took is None else took)
    if cache_read or cache_write or reasoning or is_partial:
        packed += _PARTS(cache_read, cache_write, reasoning, is_partial)
    texts = f"{status}\0{at}" if model is None else f"{status}\0{at}\0{model}"
    if error_kind is error is question is asked is None:
        return crc32(packed + texts.encode())
    return crc32(packed + f"{texts}\0{error_kind}\0{error}\0{question}\0{asked}".encode())


def content_checksum(row: int | str, text: Content, data: Content = None) -> int:
    """Return the CRC-32 of a result, of a prompt, or of settings. `row` is the id of the row, the lower half of which
    counts: the row has a checksum of its own over the whole id.
    """
    before = row & _LOW if isinstance(row, int) else crc32(row.encode())
    if data is None and isinstance(text, str):
        return crc32(text.encode(), before)
    parts = (f"{len(one)}:{one}" if isinstance(one, str) else one.hex() if one else "" for one in (text, data))
    return crc32("|".join(parts).encode(), before)


def message_checksum(row: tuple[object, ...], content: Content) -> int:
    """Return the CRC-32 of a row of `other_messages`, or of `notes`. `row` is all columns but the content."""
    said = content if isinstance(content, str) else content.hex() if content else ""
    return crc32(said.encode(), row_checksum(*row, type(content).__name__))


def task_checksum(
    task: int,
    task_id: str,
    set_to: str | None,
    crashes: int,
    answers: str | None,
    backend: str | None,
    added_by: str | None,
    edges: str,
    spec: str,
    prompt: str,
) -> int:
    """Return the CRC-32 of a row of `given_tasks`."""
    texts = f"{task} {crashes}\0{task_id}\0{edges}\0{spec}\0{prompt}"
    if set_to is answers is backend is added_by is None:
        return crc32(texts.encode())
    return crc32(f"{texts}\0{set_to}\0{answers}\0{backend}\0{added_by}".encode())


def blob_key(content: str) -> bytes:
    """Return the key of a text in `blobs`. The text is not encoded as a whole: it may have hundreds of megabytes."""
    key = sha256()
    for start in range(0, len(content), _PIECE):
        key.update(content[start : start + _PIECE].encode())
    return key.digest()
