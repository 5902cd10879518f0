"""A model server of our own: `python -m tests.real_agents.stub --port 0 --log FILE` prints its address.

`script.py` says what it answers, `wire.py` and `wire_more.py` how. To the log goes one JSON line when a
request comes (`n`, `time`, `path`, `model`, `said`, ...) and one when it is over (`ended`, `status`, `usage`, `gone`);
`requests` puts the two together. The log is what proves what a model saw, how often, and in which order.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.real_agents.script import NOBODYS, Answer, Asked, Json, Script
from tests.real_agents.wire import PAUSE, Wire, counted
from tests.real_agents.wire_more import Chat, wire_of

_LONGEST_WAIT = 120.0
_MODELS = ("stub-model", "claude-sonnet-4-5", "gemini-2.5-flash")


@dataclass(frozen=True)
class Request:
    """One request, as the log has it. `status`, `usage` and `gone` are None as long as it is not over.

    `said` is the conversation as [role, text] with roles user, assistant and tool, without what the agents add by
    themselves; calls of tools and their results are `<tool NAME {...}>` and `<result TEXT>`. `usage` has input, output
    and cached tokens as far as the client was told: by some protocols nothing of an answer that was cut. `gone`: the
    client left before the answer's end. `aside`: a request for something of the agent's own, such as a title.
    """

    n: int
    time: float
    path: str
    model: str
    streams: bool
    messages: int
    said: Sequence[tuple[str, str]]
    system: str
    tools: Sequence[str]
    schema: Any
    status: int | None = None
    usage: dict[str, int] | None = None
    gone: bool | None = None
    aside: bool = False

    @property
    def prompts(self) -> list[str]:
        """What the user said, in order, without what an agent says in the user's name."""
        return [text for role, text in self.said if role == "user" and text != NOBODYS]

    def is_about(self, text: str) -> bool:
        """Whether the last prompt holds that text."""
        return not self.aside and bool(self.prompts) and text in self.prompts[-1]


def requests(log: Path) -> list[Request]:
    """All requests so far, in the order in which they came; the counting of tokens left out."""
    # A long line is seen while it is written, its first part alone.
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    lines = [json.loads(line) for line in whole.splitlines()]
    ends = {line.pop("ended"): line for line in lines if "ended" in line}
    came = [line for line in lines if "n" in line and not line["path"].endswith("count_tokens")]
    for line in came:
        line["said"] = [(role, text) for role, text in line["said"]]
    return [Request(**line, **ends.get(line["n"], {})) for line in came]


class CutError(Exception):
    """An answer that does not come to its end: the client is gone, or the connection was to break."""

    def __init__(self, *, gone: bool) -> None:
        self.gone = gone


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self, port: int, log: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script = Script()
        self.numbers = itertools.count(1)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, **line: Any) -> None:
        os.write(self._log, json.dumps(line).encode() + b"\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        """Nothing: the log is ours."""

    def do_HEAD(self) -> None:
        self._send(200, {})

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not path.endswith("/models"):
            self._send(404, {"error": {"message": f"the stub has no {path}"}})
            return
        listed = [{"id": name, "object": "model", "type": "model", "display_name": name} for name in _MODELS]
        gemini = [{"name": f"models/{name}", "supportedGenerationMethods": ["generateContent"]} for name in _MODELS]
        self._send(200, {"object": "list", "data": listed, "has_more": False, "models": gemini})

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        body = json.loads(self._body() or b"{}")
        wire = wire_of(path)
        if wire is None:
            self._send(404, {"error": {"message": f"the stub has no {path}"}})
            return
        asked = wire.read(path, body)
        number = self._came(path, asked)
        if path.endswith(("count_tokens", ":countTokens")):
            count = counted(asked.messages)["input"]
            self._send(200, {"input_tokens": count, "totalTokens": count})
            self.server.note(ended=number, status=200, usage=None, gone=False)
            return
        answer = self.server.script.answer(asked)
        try:
            self._answer(wire, asked, answer, number)
        except (CutError, OSError) as cut:
            self.close_connection = True
            gone = not isinstance(cut, CutError) or cut.gone
            usage = wire.usage_first(asked) if asked.streams else None
            self.server.note(ended=number, status=answer.status, usage=usage, gone=gone)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _came(self, path: str, asked: Asked) -> int:
        number = next(self.server.numbers)
        self.server.note(
            n=number, time=time.time(), path=path, model=asked.model, streams=asked.streams, messages=asked.messages,
            said=[one.shown() for one in asked.said], system=asked.system, tools=list(asked.tools), schema=asked.schema,
            aside=asked.is_aside,
        )  # fmt: skip
        return number

    def _answer(self, wire: Wire, asked: Asked, answer: Answer, number: int) -> None:
        """The end is in the log before the client can have seen it."""
        usage = counted(asked.messages) if answer.status == 200 else None
        over = partial(self.server.note, ended=number, status=answer.status, usage=usage, gone=False)
        if answer.status != 200:
            over()
            self._send(answer.status, wire.error(answer), answer.retry_after)
        elif asked.streams:
            self._stream(wire, asked, answer, over)
        else:
            content = self._start(200, wire.whole(asked, answer))
            self._pause(answer)
            over()
            self.wfile.write(content)

    def _send(self, status: int, body: Json, retry_after: int | None = None) -> None:
        content = self._start(status, body, retry_after)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _start(self, status: int, body: Json, retry_after: int | None = None) -> bytes:
        """Sends the headers; the body, which is still to be sent."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        self.end_headers()
        return content

    def _stream(self, wire: Wire, asked: Asked, answer: Answer, over: Callable[[], None]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        last = b""
        for event in wire.events(asked, answer):
            self.wfile.write(last)
            last = b""
            if event is PAUSE:
                self._pause(answer)
                continue
            name = f"event: {event['type']}\n" if "type" in event else ""
            last = _chunk(f"{name}data: {json.dumps(event)}\n\n")
        over()
        done = _chunk("data: [DONE]\n\n") if isinstance(wire, Chat) else b""
        self.wfile.write(last + done + _chunk(""))

    def _pause(self, answer: Answer) -> None:
        """Waits as the answer says. CutError if the client leaves meanwhile, or if the connection is to break here."""
        end = time.monotonic() + (_LONGEST_WAIT if answer.until else answer.seconds)
        while (left := end - time.monotonic()) > 0 and not (answer.until and Path(answer.until).exists()):
            self._stay(min(left, 0.02 if answer.until else 0.5))
        self._stay(0)
        if answer.breaks:
            raise CutError(gone=False)

    def _stay(self, seconds: float) -> None:
        readable, _, _ = select.select([self.connection], [], [], seconds)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise CutError(gone=True)


def _chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass(frozen=True)
class Stub:
    """A stub under way. `pid` is that of its process."""

    url: str
    log: Path
    pid: int

    def requests(self) -> list[Request]:
        return requests(self.log)

    def wait_for(self, text: str, count: int = 1, seconds: float = 30) -> list[Request]:
        """The requests whose last prompt holds `text`, once there are `count` of them."""
        end = time.monotonic() + seconds
        while len(found := [one for one in self.requests() if one.is_about(text)]) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} requests about {text!r} within {seconds} s"
            time.sleep(0.02)
        return found


@contextmanager
def running(log: Path) -> Iterator[Stub]:
    """A stub in a process and session of its own: it outlives whoever a test kills, and ends when the tests do."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.real_agents.stub", "--port", "0", "--log", str(log), "--while-stdin-is-open"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdin and process.stdout
    with process:
        try:
            yield Stub(process.stdout.readline().strip(), log, process.pid)
        finally:
            process.terminate()


def _end_with(stdin: Any) -> None:
    stdin.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.real_agents.stub")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--while-stdin-is-open", action="store_true")
    options = parser.parse_args()
    server = Server(options.port, options.log)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    if options.while_stdin_is_open:
        threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
