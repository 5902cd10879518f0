"""The checksums beside results and messages: they detect a changed text, and a text of another run or task.

The lengths of the parts are hashed with the parts, so two different sets of parts never give the same bytes.
"""

from __future__ import annotations

from hashlib import sha256


def result_checksum(run_id: str, task_id: str, text: str, data: str | None) -> bytes:
    """Return the SHA-256 of the result, with run and task."""
    result = f"text:{len(text)}:{text}" if data is None else f"data:{len(text)}:{text}{data}"
    return sha256(f"{len(run_id)}:{run_id}{len(task_id)}:{task_id}{result}".encode()).digest()


def message_checksum(run_id: str, task_id: str, role: str, content: str) -> bytes:
    """Return the SHA-256 of the message, with run and task."""
    return sha256(f"{len(run_id)}:{run_id}{len(task_id)}:{task_id}{len(role)}:{role}{content}".encode()).digest()
