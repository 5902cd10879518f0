"""Python programs in processes that need not load plait first: forked from one that has (warm_server.py).

Each is a real process, with a pid, descriptors and an end of its own, and dies of the signals that it is sent. What it
has not done is to start an interpreter and to import everything, half a second of a processor each time. Every command
is started that way as well, in tests/docs/test_pages.py. Warnings are errors here, unless a program is another
project's.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO, Any, Self

_LOCK = threading.Lock()
_ROOT = Path(__file__).parents[3]
_SERVER = "tests.support.processes.warm_server"


class Warm:
    """A process, used as `subprocess.Popen` is; text is UTF-8. `words` are those of a cold start: our interpreter, its
    options, and `-m MODULE ...` or `-c CODE ...`.
    """

    stdin: IO[Any] | None = None
    stdout: IO[Any] | None = None
    stderr: IO[Any] | None = None
    returncode: int | None = None

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: Path = _ROOT,
        env: Mapping[str, str] = os.environ,
        stdin: Any = DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        loaded: tuple[str, ...] = (),
        warnings: str = "error",
    ) -> None:
        """`loaded` names modules that the program imports and most programs do not: a server of its own loads them.
        `warnings` is the interpreter's option -W.
        """
        self.words = [str(word) for word in words]
        begins = next(number for number, word in enumerate(self.words) if word in {"-m", "-c"})
        request = {"words": self.words[begins:], "cwd": str(cwd), "env": dict(env), "new_session": start_new_session}
        with contextlib.ExitStack() as theirs:
            given = [self._end_for(*one, theirs) for one in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr))]
            given[2] = given[1] if stderr == STDOUT else given[2]
            told, telling = os.pipe()
            theirs.callback(os.close, telling)
            _ask(json.dumps(request).encode(), [*given, telling], loaded, warnings)
        self._told = os.fdopen(told)
        pid = self._told.readline()
        if not pid:
            raise RuntimeError(
                "the process of tests/support/processes/warm_server.py has ended; see its standard error"
            )
        self.pid = int(pid)

    def _end_for(self, name: str, wanted: Any, theirs: contextlib.ExitStack) -> int:
        """The process's end of what `wanted` says."""
        if wanted in {None, STDOUT}:
            return {"stdin": 0, "stdout": 1, "stderr": 2}[name]
        if wanted == DEVNULL:
            end = os.open(os.devnull, os.O_RDWR)
        elif wanted == PIPE:
            reading, writing = os.pipe()
            ours, mode, end = (writing, "w", reading) if name == "stdin" else (reading, "r", writing)
            setattr(self, name, os.fdopen(ours, mode, encoding="utf-8", errors="surrogateescape"))
        else:
            return wanted if isinstance(wanted, int) else wanted.fileno()
        theirs.callback(os.close, end)
        return end

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None before the end."""
        if self.returncode is None and self._has_ended(0):
            return self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.words, timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def communicate(self, said: str = "", timeout: float | None = None) -> tuple[Any, Any]:
        """Say that, and wait for the end; all of the output. Raises TimeoutExpired, after it has killed the process."""
        if self.stdin is not None:
            self.stdin.write(said)
            self.stdin.close()
        heard = [_Heard(stream) for stream in (self.stdout, self.stderr)]
        self.stdout = self.stderr = None
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise  # and leave the pipes to children that outlive it
        out, err = (one.all() for one in heard)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._close()
        if kind is not None:  # nothing has told it to end
            self.kill()
        self.wait()

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._told], [], [], timeout)[0])


class _Heard:
    """What is said on a stream, read beside whatever else is done."""

    def __init__(self, stream: IO[Any] | None) -> None:
        self._said: Any = None
        self._stream = stream
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def all(self) -> Any:
        """All of it, once nobody holds the other end any more; None where there is no stream."""
        self._reading.join()
        return self._said

    def _read(self) -> None:
        if self._stream is not None:
            with self._stream:
                self._said = self._stream.read()


def run(words: Sequence[str | Path], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process from its beginning to its end, its output through pipes. Raises TimeoutExpired."""
    with Warm(words, stdout=PIPE, stderr=PIPE, **options) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.words, process.wait(), out, err)


def _ask(request: bytes, descriptors: Sequence[int], loaded: tuple[str, ...], warnings: str) -> None:
    with _LOCK:
        server = _server(loaded, warnings)
        socket.send_fds(server, [len(request).to_bytes(4)], descriptors)
        server.sendall(request)


@cache
def _server(loaded: tuple[str, ...], warnings: str) -> socket.socket:
    """The connection to the server with these modules, which ends with us."""
    ours, theirs = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-W", warnings, "-m", _SERVER, str(theirs.fileno()), *loaded],
            cwd=_ROOT,
            env={**environment, "PYTHONPATH": str(_ROOT)},
            stdin=DEVNULL,
            stdout=DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(_stop, ours, server)
    return ours


def _stop(ours: socket.socket, server: subprocess.Popen[bytes]) -> None:
    ours.close()
    server.wait(60)
