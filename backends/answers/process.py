"""The process that checks one answer whose check may take long, seen from both sides.

The process is killed when the caller is cancelled. It ends itself after `CPU_LIMIT` seconds of processor time, also
when the process that started it is dead. It reads the schema and the answer from standard input, and writes a verdict
in one line to standard output, followed by the fitting value as JSON or by the places that do not fit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from plait.backends.answers.schema import Mismatch, Schema
from plait.backends.errors import BackendError, ErrorKind

CPU_LIMIT = 10
"""Seconds of processor time that a check may take."""
MEMORY_LIMIT = 2 << 30
"""Bytes of memory for one check: a list of a million mismatches takes less."""
_WALL_FACTOR = 6
"""Seconds that a process may take for each second of processor time: the machine may be busy."""
_PROGRAM = "import sys; sys.path[:0] = sys.argv[2:]; from plait.backends.answers.process import main; main()"
_FITS, _MISMATCH = b"fits\n", b"mismatch\n"


class CheckingProcess:
    """The process of one check, from the side of the thread that waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self) -> None:
        """Kill the process; none is started from now on. Called from another thread."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def read(self, schema: str, answer: str) -> str:
        """Return the JSON of the value in `answer` that fits `schema`.

        Raises Mismatch, and BackendError (invalid_output) if the check does not end in time.
        """
        with self._lock:
            if self._stopped:
                raise _took_too_long()
            self._process = process = _start()
        given = schema.encode()
        try:
            told, _ = process.communicate(b"%d\n%s%s" % (len(given), given, answer.encode()), CPU_LIMIT * _WALL_FACTOR)
        except subprocess.TimeoutExpired:
            told = b""
        finally:
            process.kill()
            process.communicate()
        if told.startswith(_FITS):
            return told[len(_FITS) :].decode()
        if told.startswith(_MISMATCH):
            raise Mismatch(told[len(_MISMATCH) :].decode() or "it does not fit, in too many places to list")
        raise _took_too_long()


def _took_too_long() -> BackendError:
    return BackendError(
        ErrorKind.INVALID_OUTPUT,
        f"the answer cannot be checked against output_schema: that took more than {CPU_LIMIT} s, or too much memory; "
        "make the schema simpler or the answer smaller",
    )


def _start() -> subprocess.Popen[bytes]:
    found = importlib.util.find_spec("jsonschema_rs")
    homes = [str(Path(one).parent.parent) for one in (_plait(), found and found.origin) if one]
    # Ctrl-C in a terminal reaches the processes of the terminal's group: the check goes on until this process ends it.
    return subprocess.Popen(  # noqa: S603 - our own program, no shell
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(CPU_LIMIT), *homes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _plait() -> str | None:
    found = importlib.util.find_spec("plait")
    return found.origin if found is not None else None


def _limit_resources(seconds: int) -> None:
    with suppress(AttributeError, OSError):  # Windows has no `nice`
        os.nice(5)  # the event loop of the process that waits comes first
    with suppress(ImportError, ValueError, OSError):  # Windows has no `resource`; the parent's limit remains
        import resource  # noqa: PLC0415

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def main() -> None:
    """Check the answer on standard input: the length of the schema, a line end, the schema as JSON and the answer."""
    _limit_resources(int(sys.argv[1]))
    size = int(sys.stdin.buffer.readline())
    schema = Schema(json.loads(sys.stdin.buffer.read(size)))
    out = sys.stdout.buffer
    try:
        value, fits = schema.find(sys.stdin.buffer.read().decode())
    except Mismatch as mismatch:
        out.write(_MISMATCH + str(mismatch).encode())
        return
    if fits:
        out.write(_FITS + json.dumps(value, ensure_ascii=False).encode())
        return
    # The verdict is known; listing the places may take longer than all that was before.
    out.write(_MISMATCH)
    out.flush()
    out.write(str(schema.mismatch(value)).encode())
