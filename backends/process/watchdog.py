"""Children that are to die with this process, however it dies.

One process of our own, started when it is first needed, is told of their turns through a socket. That ends when we do,
kill -9 included; then it kills all that belong to one of them, and ends. PR_SET_PDEATHSIG would not do: it tells of the
end of a thread, reaches the child alone, not its tools, and is Linux's.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.backends.process.proctable import Turn, start_time

_PROGRAM = Path(__file__).with_name("_watchdog.py")
# SIGPIPE may be deadly here; and a guard that does not read any more must not stop us.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NO_WAIT = _NO_SIGNAL | socket.MSG_DONTWAIT


class _Guard:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: socket.socket | None = None
        self._pid = 0
        self._watched: dict[str, bytes] = {}

    def watch(self, turn: Turn, folder: Path | None = None) -> None:
        """Have all that belong to the turn killed when this process ends, until `forget`; `folder` is removed then,
        too. To be said again when more is known of the turn. OSError when no process can be started.
        """
        with self._lock:
            line = json.dumps([*turn, None if folder is None else os.fspath(folder)]).encode() + b"\n"
            self._watched[turn.marker] = line
            self._say(line)

    def forget(self, marker: str) -> None:
        """Nothing of it is left."""
        with self._lock:
            if self._watched.pop(marker, None) is not None:
                with suppress(OSError):  # no guard can be started, so none will kill anything
                    self._say(json.dumps([marker]).encode() + b"\n")

    def leave_to_parent(self) -> None:
        """This process is a copy: what was watched dies with the original, and the copy must not hide its end."""
        if self._said is not None:
            self._said.close()
        self._lock, self._said, self._watched = threading.Lock(), None, {}

    def _say(self, line: bytes) -> None:
        if self._said is not None:
            try:
                self._said.sendall(line, _NO_WAIT)
            except OSError:  # it was killed: another one has to know of all
                self._drop(self._said)
            else:
                return
        self._pid, self._said = _start()
        self._said.sendall(b"".join(self._watched.values()), _NO_SIGNAL)

    def _drop(self, said: socket.socket) -> None:
        self._said = None
        with suppress(OSError):
            said.close()  # should it live after all, it waits for our end
        with suppress(OSError):
            os.waitpid(self._pid, os.WNOHANG)


def _start() -> tuple[int, socket.socket]:
    """The number of a new guard, and the end of a socket that it listens to."""
    said, heard = socket.socketpair()
    try:
        with heard, open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            program = [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), start_time(os.getpid()) or ""]
            own = (heard.fileno(), nowhere.fileno(), nowhere.fileno())
            actions = [(os.POSIX_SPAWN_DUP2, descriptor, as_) for as_, descriptor in enumerate(own)]
            # Not `subprocess`, which would warn at our end of a child that is meant to outlive us.
            return os.posix_spawn(program[0], program, {}, file_actions=actions, setsid=True), said
    except BaseException:
        said.close()
        raise


GUARD = _Guard()
"""That of this process."""
os.register_at_fork(after_in_child=GUARD.leave_to_parent)


@contextmanager
def scratch() -> Generator[Path]:
    """A temporary folder of our own, which is removed at the end, also when we are killed before."""
    name = secrets.token_hex(8)
    try:
        with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as folder:
            with suppress(OSError):
                GUARD.watch(Turn(name), Path(folder))
            yield Path(folder)
    finally:
        GUARD.forget(name)
