"""The ledger: one append-only file per trial, written by the processes under test and read by the judge.

Every line is a JSON list that starts with one of the words below. A line is a single write to a file opened for
appending, so lines written before a SIGKILL survive, in the order of writing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN = "begin"
"""[begin, pid, verb]: a process starts."""
FOUND = "found"
"""[found, snapshot | None]: the stored state at the start of the process; None without the run."""
EXEC = "exec"
"""[exec, task, pid, seconds]: the fake backend was called, at a time in monotonic seconds; no work is done yet."""
DONE = "done"
"""[done, task, pid]: the answer of the task is ready."""
FAIL = "fail"
"""[fail, task, pid]: the execution is about to fail."""
ACK = "ack"
"""[ack, task, status, result]: the end of the task was reported to a listener."""
ANSWER = "answer"
"""[answer, task]: a person allows another execution of the task."""
REACH = "reach"
"""[reach, name, hit]: the process reached the point; the fate takes effect."""
END = "end"
"""[end, status, snapshot]: the run ended undisturbed, with the stored state after the end."""
COUNT = "count"
"""[count, {name: hits}]: the hits of each boundary in an undisturbed process."""
DIED = "died"
"""[died, pid, how]: the process ended; written by the parent."""
RAISED = "raised"
"""[raised, pid, error, text]: the process ended with an error."""
NOTE = "note"
"""[note, text]: a violation seen by a process under test."""

Line = list[Any]


class Ledger:
    """Append access to the file at `path`. Safe in any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *line: Any) -> None:
        """Append a line in a single write."""
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def lines(self) -> list[Line]:
        """Return all lines up to now, including lines of other processes."""
        return list(_lines(self._path))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
