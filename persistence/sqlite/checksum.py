"""The checksums of the rows: they detect every changed column, and a row that stands in the place of another.

Theory: a bit that a disk or a memory has flipped in a text is invisible to SQLite. Every row therefore has a checksum
over all of its columns, ids included: a SHA-256 for answers, messages and results, and a CRC-32 for all other rows,
which takes a third of the time and detects every burst of up to 32 bits. A text in `blobs` counts as its key, which is
the SHA-256 of the text.

The checksums are a part of the cost of every task, so the numbers of the usual rows are packed: writing a float as text
takes as long as a SHA-256. NULL is written as None or NaN; SQLite stores no NaN.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from math import nan as NAN  # noqa: N812 - a constant
from typing import Final, TypeAlias
from zlib import crc32

from plait.persistence.errors import StoreError

_START: Final = struct.Struct("<4q").pack
_TASK = _START
_END: Final = struct.Struct("<4q2d").pack
_PARTS: Final = struct.Struct("<4q").pack
_PIECE: Final = 1 << 20  # characters
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


def start_checksum(  # noqa: PLR0913, PLR0917 - the columns of `starts`
    start: int, task: int, attempt: int, backend: str, session_id: str | None, confirmed: int, at: str
) -> int:
    """Return the CRC-32 of a row of `starts`."""
    return crc32(_START(start, task, attempt, confirmed) + f"{backend}\0{session_id}\0{at}".encode())


def end_checksum(  # noqa: PLR0913, PLR0917 - the columns of `ends` from `id` to `asked`
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
    error_kind: str | None,
    error: str | None,
    question: str | None,
    asked: str | None,
) -> int:
    """Return the CRC-32 of a row of `ends`, without prompt, text and data."""
    cost, took = NAN if cost is None else cost, NAN if took is None else took
    texts = f"{status}\0{at}\0{model}\0{error_kind}\0{error}\0{question}\0{asked}"
    checksum = crc32(_END(start, end, tokens_in, tokens_out, cost, took) + texts.encode())
    if cache_read or cache_write or reasoning or is_partial:
        return crc32(_PARTS(cache_read, cache_write, reasoning, is_partial), checksum)
    return checksum


def completion_checksum(  # noqa: PLR0913, PLR0917 - columns of `ends`
    start: int, end: int, at: str, tokens_in: int, tokens_out: int, cost: float | None, took: float, model: str | None
) -> int:
    """Return `end_checksum` of an attempt that completed, has no error and no question, and no tokens counted apart."""
    texts = f"completed\0{at}\0{model}\0None\0None\0None\0None"
    return crc32(_END(start, end, tokens_in, tokens_out, NAN if cost is None else cost, took) + texts.encode())


def content_checksum(row: int | str, text: Content, data: Content = None) -> bytes:
    """Return the SHA-256 of a result, of a prompt, or of settings; `row` is the id of the row."""
    if data is None and isinstance(text, str):
        return sha256(f"{row} {len(text)}:{text}".encode()).digest()
    parts = (f"{len(one)}:{one}" if isinstance(one, str) else one.hex() if one else "" for one in (text, data))
    return sha256(f"{row} {'|'.join(parts)}".encode()).digest()


def message_checksum(row: tuple[object, ...], content: Content) -> bytes:
    """Return the SHA-256 of a row of `other_messages`, or of `notes`. `row` is all columns but the content."""
    said = f"{len(content)}:{content}" if isinstance(content, str) else content.hex() if content else ""
    return sha256(f"{row!a}{said}".encode()).digest()


def task_checksum(  # noqa: PLR0913, PLR0917 - the columns of `given_tasks`, without `run`
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
    texts = f"{task_id}\0{set_to}\0{answers}\0{backend}\0{added_by}\0{edges}\0{spec}\0{prompt}"
    return crc32(_TASK(task, crashes, len(edges), len(spec)) + texts.encode())


def blob_key(content: str) -> bytes:
    """Return the key of a text in `blobs`. The text is not encoded as a whole: it may have hundreds of megabytes."""
    key = sha256()
    for start in range(0, len(content), _PIECE):
        key.update(content[start : start + _PIECE].encode())
    return key.digest()
