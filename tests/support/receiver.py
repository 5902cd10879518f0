"""A receiver of notices on 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted. Answers with `status`, after `on_notice` has seen the notice."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 204
        self.location = ""
        self.notices: list[dict[str, Any]] = []
        """Those that were answered with a good status."""
        self.refused: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived = threading.Event()
        """Set once a notice was answered with a good status."""
        self.on_notice: Callable[[dict[str, Any]], None] = lambda _notice: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook/of-the-team"

    @property
    def told(self) -> list[tuple[str, str]]:
        """The run and the word of each notice."""
        return [(one["run"], one["on"]) for one in self.notices]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = cast("Receiver", self.server)
        notice = json.loads(self.rfile.read(int(self.headers["content-length"])))
        receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
        (receiver.notices if receiver.status < 300 else receiver.refused).append(notice)
        receiver.on_notice(notice)
        self.send_response(receiver.status)
        if receiver.location:
            self.send_header("location", receiver.location)
        self.send_header("content-length", "0")
        self.end_headers()
        if receiver.status < 300:
            receiver.arrived.set()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        return


@contextmanager
def receiving() -> Generator[Receiver]:
    """Receive inside the block."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()
