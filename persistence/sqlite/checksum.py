"""The checksums of the rows: they detect every changed column, and a row that stands in the place of another.

Theory: a bit that a disk or a memory has flipped in a text is invisible to SQLite. Every row therefore has a checksum
over all of its columns, ids included: a SHA-256 for prompts, answers and results, and for narrow rows a CRC-32, which
takes a fifth of the time and detects every burst of up to 32 bits. A text in `blobs` counts as its key, which is the
SHA-256 of the text.

Numbers and texts are written with their lengths or with `!a`, so two different rows never give the same bytes. `!a`
writes only ASCII; `!r` would depend on the characters that a version of Python knows.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, TypeAlias
from zlib import crc32

from plait.persistence.errors import StoreError

Content: TypeAlias = str | bytes | None
"""A text, the key of a text in `blobs`, or NULL."""


def damaged(run_id: str, what: str) -> StoreError:
    """Return the error for a part of the run that does not fit its checksum."""
    return StoreError(
        f"run {run_id!r} is damaged: {what} does not fit its checksum; restore a copy of the store, or start a new run"
    )


def row_checksum(*row: object) -> int:
    """Return the CRC-32 of a narrow row."""
    return crc32(ascii(row).encode())


def start_checksum(*row: object) -> int:
    """Return the CRC-32 of the columns of `starts`, in two thirds of the time of `row_checksum`."""
    start, task, attempt, backend, session_id, confirmed, at = row
    return crc32(f"{start} {task} {attempt} {backend!a} {session_id!a} {confirmed} {at!a}".encode())


def end_checksum(*row: object) -> int:
    """Return the CRC-32 of the columns of `ends` from `id` to `asked`."""
    start, end, status, at, tokens_in, tokens_out, cost, took, model, *texts = row
    usage = f"{tokens_in} {tokens_out} {cost} {took} {model!a}"
    return crc32(f"{start} {end} {status} {at!a} {usage} {' '.join(map(ascii, texts))}".encode())


def completion_checksum(*row: object) -> int:
    """Return `end_checksum` of a completed attempt: the status, and the four missing texts, are added to `row`."""
    start, end, at, tokens_in, tokens_out, cost, took, model = row
    usage = f"{tokens_in} {tokens_out} {cost} {took} {model!a}"
    return crc32(f"{start} {end} completed {at!a} {usage} None None None None".encode())


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


def task_checksum(*row: Any) -> bytes:
    """Return the SHA-256 of the columns of `given_tasks` from `id` to `prompt`, without `run`."""
    task, task_id, set_to, crashes, answers, backend, added_by, edges, spec, prompt = row
    state = f"{task} {task_id!a} {set_to} {crashes} {answers!a} {backend!a} {added_by!a}"
    return sha256(f"{state} {len(edges)} {len(spec)} {edges}{spec}{prompt}".encode()).digest()


def blob_key(content: str) -> bytes:
    """Return the key of a text in `blobs`."""
    return sha256(content.encode()).digest()
