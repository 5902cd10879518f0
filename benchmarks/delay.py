"""A TCP proxy that delays each direction: `python -m benchmarks.delay SOCKET SECONDS` prints its port, and serves.

Threads, because asyncio rounds a delay of half a millisecond up to a whole one. In a process of its own, so that the
measured process shares no interpreter lock with the proxy.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

_READ = 262_144


def serve(path: str, delay: float) -> None:
    """Forward each connection to the Unix socket `path`, `delay` seconds later in each direction."""
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    while True:
        client, _ = listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = socket.socket(socket.AF_UNIX)
        server.connect(path)
        for source, target in ((client, server), (server, client)):
            due: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
            threading.Thread(target=_receive, args=(source, due, delay), daemon=True).start()
            threading.Thread(target=_send, args=(target, due), daemon=True).start()


def _receive(source: socket.socket, due: SimpleQueue[tuple[float, bytes]], delay: float) -> None:
    data = b"begun"
    while data:
        data = b""
        with suppress(OSError):
            data = source.recv(_READ)
        due.put((time.perf_counter() + delay, data))


def _send(target: socket.socket, due: SimpleQueue[tuple[float, bytes]]) -> None:
    with target:
        while True:
            at, data = due.get()
            if not data:
                with suppress(OSError):
                    target.shutdown(socket.SHUT_RDWR)
                return
            time.sleep(max(0.0, at - time.perf_counter()))
            with suppress(OSError):
                target.sendall(data)


@contextmanager
def delayed(path: str, delay: float) -> Generator[int]:
    """Yield the port of a proxy in front of the Unix socket `path`."""
    command = [sys.executable, "-m", "benchmarks.delay", path, str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
