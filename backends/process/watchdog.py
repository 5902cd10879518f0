"""Kill the children of this process when this process ends, whatever ends it.

The first use starts one process, the watchdog, and sends the tags of the children to it through a socket. The socket
ends with this process, even by kill -9; the watchdog then kills all processes of the tags, and exits. PR_SET_PDEATHSIG
would not do: the signal follows the end of a thread, reaches the child but not the child's tools, and is Linux's alone.
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

from plait.backends.process.process_table import ProcessTag, library, start_time

_PROGRAM = Path(__file__).with_name("_watchdog_main.py")
# SIGPIPE could kill this process, and a full socket of a stuck watchdog must not block it.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NO_WAIT = _NO_SIGNAL | socket.MSG_DONTWAIT


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._watched: dict[str, bytes] = {}

    def watch(self, tag: ProcessTag, folder: Path | None = None) -> None:
        """Have the processes of a tag killed, and `folder` removed, when this process ends, until `unwatch`.

        Call again when more of the tag is known. Raise OSError if no process can be started.
        """
        with self._lock:
            line = json.dumps([*tag, None if folder is None else os.fspath(folder)]).encode() + b"\n"
            self._watched[tag.marker] = line
            self._send(line)

    def unwatch(self, marker: str) -> None:
        """Stop watching a marker: no process carries it any more."""
        with self._lock:
            if self._watched.pop(marker, None) is not None:
                with suppress(OSError):  # no watchdog can be started, so none will kill anything
                    self._send(json.dumps([marker]).encode() + b"\n")

    def reset_after_fork(self) -> None:
        """Drop everything in a forked copy: the children die with the original, whose end the copy must not hide."""
        if self._socket is not None:
            self._socket.close()
        self._lock, self._socket, self._watched = threading.Lock(), None, {}

    def _send(self, line: bytes) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(line, _NO_WAIT)
            except OSError:  # the watchdog was killed: a new watchdog receives everything
                self._drop(self._socket)
            else:
                return
        self._pid, self._socket = _start()
        self._socket.sendall(b"".join(self._watched.values()), _NO_SIGNAL)

    def _drop(self, ours: socket.socket) -> None:
        self._socket = None
        with suppress(OSError):
            ours.close()  # a watchdog that lives after all waits for the end of this process
        with suppress(OSError):
            os.waitpid(self._pid, os.WNOHANG)


def _start() -> tuple[int, socket.socket]:
    """Start a watchdog. Return its process number, and the end of the socket to its standard input."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            watched = [str(os.getpid()), start_time(os.getpid()) or "", library()]
            program = [sys.executable, "-I", "-S", str(_PROGRAM), *watched]
            standard = (theirs.fileno(), nowhere.fileno(), nowhere.fileno())
            actions = [(os.POSIX_SPAWN_DUP2, descriptor, as_) for as_, descriptor in enumerate(standard)]
            # `subprocess` would warn at exit of a child that is meant to outlive this process.
            return os.posix_spawn(program[0], program, {}, file_actions=actions, setsid=True), ours
    except BaseException:
        ours.close()
        raise


WATCHDOG = _Watchdog()
"""The watchdog of this process."""
os.register_at_fork(after_in_child=WATCHDOG.reset_after_fork)


@contextmanager
def scratch() -> Generator[Path]:
    """Make a temporary folder, and remove the folder on leaving, or when this process is killed before."""
    name = secrets.token_hex(8)
    try:
        with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as folder:
            with suppress(OSError):
                WATCHDOG.watch(ProcessTag(name), Path(folder))
            yield Path(folder)
    finally:
        WATCHDOG.unwatch(name)
