"""The ledger: an append-only file for each trial, written by the processes under test and read by the judge.

Each line is a JSON list starting with one of the words below. A line is a single write to a file opened for appending,
so lines written before a SIGKILL survive, in the order of writing.
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
"""[found, snapshot | None]: the content of the store at that time; None without the run."""
EXEC = "exec"
"""[exec, task, pid, seconds]: the fake backend was called and has not worked yet."""
DONE = "done"
"""[done, task, pid]: the answer is ready."""
FAIL = "fail"
"""[fail, task, pid]: the call is about to fail."""
ACK = "ack"
"""[ack, task, status, result]: a result was delivered to a listener."""
ANSWER = "answer"
"""[answer, task]: a person requests another execution."""
REACH = "reach"
"""[reach, name, hit]: the process ends itself here."""
END = "end"
"""[end, status, snapshot]: the run ended by itself, with the content of the store."""
COUNT = "count"
"""[count, {name: hits}]: the hits of each failpoint in a process that ended by itself."""
DIED = "died"
"""[died, pid, how]: written by the parent."""
RAISED = "raised"
"""[raised, pid, error, text]: the process ended with an error."""
NOTE = "note"
"""[note, text]: a violation observed by the child."""

Line = list[Any]


class Ledger:
    """Append access to the file at `path`. Safe in any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *line: Any) -> None:
        """Write a line immediately."""
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def lines(self) -> list[Line]:
        """Return all lines up to now, including lines of other processes."""
        return list(_lines(self._path))

    def close(self) -> None:
        os.close(self._file)


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
