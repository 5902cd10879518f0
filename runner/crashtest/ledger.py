"""The witness: one append-only file a trial, written by the processes under test, read by the judge.

Every line is a JSON list that starts with one of the words below. A line is one write to a file opened for appending,
so what was written before a SIGKILL is there after it, in the order in which it was written.
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
"""[found, snapshot | None]: what the store held then, None where it had no such run."""
EXEC = "exec"
"""[exec, task, pid, seconds]: the stand-in was called; nothing is done yet."""
DONE = "done"
"""[done, task, pid]: its answer is ready."""
FAIL = "fail"
"""[fail, task, pid]: it is about to fail."""
ACK = "ack"
"""[ack, task, status, result]: a listener was told."""
ANSWER = "answer"
"""[answer, task]: a person has it run again."""
REACH = "reach"
"""[reach, name, hit]: the process ends itself here."""
END = "end"
"""[end, status, snapshot]: the run ended by itself; what the store holds now."""
COUNT = "count"
"""[count, {name: hits}]: how often each boundary was met by a process that ended by itself."""
DIED = "died"
"""[died, pid, how]: written by the parent."""
RAISED = "raised"
"""[raised, pid, error, text]: the process ended by an error."""
NOTE = "note"
"""[note, text]: something that must not be."""

Line = list[Any]


class Ledger:
    """Appends to the file at `path`. Safe on any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *line: Any) -> None:
        """One line, written at once."""
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def lines(self) -> list[Line]:
        """All lines so far, those of other processes included."""
        return list(_lines(self._path))

    def close(self) -> None:
        os.close(self._file)


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
