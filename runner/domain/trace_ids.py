"""The ids of a run in traces (W3C Trace Context): hashes of the ids of the run, the task and the attempt.

The same attempt has the same ids in each process and each export, so spans can be made after a crash and sent twice.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256


@lru_cache(maxsize=16)
def trace_id(run_id: str) -> str:
    """Return the id of the run's trace: 32 hexadecimal digits."""
    return _digest("trace", run_id)[:32]


def span_id(run_id: str, task_id: str | None = None, attempt: int | None = None) -> str:
    """Return the id of the span of a run, of a task, or of an attempt: 16 hexadecimal digits."""
    return _digest("span", run_id, task_id, attempt)[:16]


def traceparent(run_id: str, task_id: str, attempt: int | None = None) -> str:
    """Return the value of TRACEPARENT for a process that works for the attempt; without one, for the task."""
    return f"00-{trace_id(run_id)}-{span_id(run_id, task_id, attempt)}-01"


def _digest(*parts: str | int | None) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()
