"""The checksum beside each result and message: what is read is what was written, for this very run and task.

Lengths go in with the parts, so that no two different sets of parts make the same bytes.
"""

from __future__ import annotations

from hashlib import sha256


def result_checksum(run_id: str, task_id: str, text: str, data: str | None) -> bytes:
    result = f"text:{len(text)}:{text}" if data is None else f"data:{len(text)}:{text}{data}"
    return sha256(f"{len(run_id)}:{run_id}{len(task_id)}:{task_id}{result}".encode()).digest()


def message_checksum(run_id: str, task_id: str, role: str, content: str) -> bytes:
    return sha256(f"{len(run_id)}:{run_id}{len(task_id)}:{task_id}{len(role)}:{role}{content}".encode()).digest()
