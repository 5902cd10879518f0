"""`python -m benchmarks.model_server SLOTS SECONDS [PER_MINUTE CAPACITY]`: a stub of a model server on 127.0.0.1.

An answer of 200 characters takes SECONDS, or, with SECONDS as LOW-HIGH, a random time in that range, in one of SLOTS
slots; further requests wait. A streamed answer comes in 10
chunks, evenly spread over its time. `GET /figures` returns the figures since the previous such request. The server
refuses a request with 429 and Retry-After if its bucket of CAPACITY requests, refilled with PER_MINUTE, is empty. It
reads requests with as little code as possible, because it shares the machine with the measured client.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence

ANSWER = "x" * 200
PIECES = 10
_SIZE = b"content-length: "


def _chunk(choice: dict[str, object], **more: object) -> bytes:
    event = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
    data = f"data: {json.dumps(event)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


USAGE = {"prompt_tokens": 10, "completion_tokens": 50, "total_tokens": 60}
_PIECE = _chunk({"index": 0, "delta": {"content": ANSWER[: len(ANSWER) // PIECES]}, "finish_reason": None})
_DONE = b"data: [DONE]\n\n"
_END = b"%s%x\r\n%s\r\n0\r\n\r\n" % (
    _chunk({"index": 0, "delta": {}, "finish_reason": "stop"}, usage=USAGE),
    len(_DONE),
    _DONE,
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
_BODY = json.dumps(
    {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [_CHOICE], "usage": USAGE}
)
_WHOLE = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(_BODY)}\r\n\r\n{_BODY}".encode()
_ERROR = json.dumps({"error": {"message": "too many requests", "type": "rate_limit_error", "code": "rate_limit"}})
_REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: %s\r\ncontent-length: "
    + f"{len(_ERROR)}\r\n\r\n{_ERROR}".encode()
)


class Bucket:
    """A token bucket for requests, full at first and refilled continuously."""

    SETTLED_S = 2.0
    """Seconds after which the use is measured, so that the bursts at the beginning do not count."""

    def __init__(self, per_minute: float, capacity: float) -> None:
        self._per_second, self._capacity = per_minute / 60, capacity
        self._level, self._at = capacity, time.perf_counter()
        self._granted: list[float] = []
        self.refused = 0

    def refusal(self) -> bytes | None:
        """Take one request from the bucket; the response if the bucket is empty."""
        now = time.perf_counter()
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_second)
        self._at = now
        if self._level >= 1:
            self._level -= 1
            self._granted.append(now)
            return None
        self.refused += 1
        wait = max(1, round((1 - self._level) / self._per_second))
        return _REFUSED % (b"%d" % wait)

    def figures(self) -> dict[str, float]:
        """Return the refused requests, and the granted ones as a share of the refill."""
        later = [at for at in self._granted if at - self._granted[0] > self.SETTLED_S]
        used = (len(later) - 1) / (self._per_second * (later[-1] - later[0])) if len(later) > 1 else 0.0
        return {"refused": self.refused, "used": used}


class Chance:
    """Refuses a share of all requests at random, with a wait of a second."""

    def __init__(self, share: float) -> None:
        self._share, self._random = share, random.Random(7)
        self.refused = 0

    def refusal(self) -> bytes | None:
        """Return the response to a refused request; None for another."""
        if self._random.random() >= self._share:
            return None
        self.refused += 1
        return _REFUSED % b"1"

    def figures(self) -> dict[str, float]:
        """Return the refused requests."""
        return {"refused": self.refused}


class Slots:
    """The slots of the server, and the figures."""

    def __init__(self, slots: int, seconds: Sequence[float], bucket: Bucket | Chance | None = None) -> None:
        self._seconds = seconds
        self._random = random.Random(1)
        self.bucket = bucket
        self._slots = self._free = slots
        self._waiting: deque[Connection] = deque()
        self._reset()

    def _reset(self) -> None:
        self.connections = self._served = 0
        self._busy = 0.0
        self._first: float | None = None
        self._last = 0.0

    def duration(self) -> float:
        """Return the seconds of the next answer."""
        return self._random.uniform(self._seconds[0], self._seconds[-1])

    def enter(self, connection: Connection) -> None:
        self._first = self._first or time.perf_counter()
        if self._free:
            self._free -= 1
            connection.begin()
        else:
            self._waiting.append(connection)

    def leave(self, took: float) -> None:
        self._served += 1
        self._busy += took
        self._last = time.perf_counter()
        if self._waiting:
            self._waiting.popleft().begin()
        else:
            self._free += 1

    def figures(self) -> bytes:
        span = self._last - (self._first or 0.0)
        share = self._busy / self._slots / span if self._served else 0.0
        found = {"connections": self.connections, "served": self._served, "busy": share, "span_s": span}
        if self.bucket is not None:
            found |= self.bucket.figures()
        self._reset()
        body = json.dumps(found).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Connection(asyncio.Protocol):
    """One connection, which serves one request after the other."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._read = b""
        self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET "):
            self._read = b""
            self._transport.write(self._slots.figures())
            return
        lowered = head.lower()
        at = lowered.find(_SIZE) + len(_SIZE)
        if len(body) < int(lowered[at:].split(b"\r\n", 1)[0]):
            return
        self._read = b""
        self._streams = json.loads(body).get("stream", False)
        self._slots.connections += not getattr(self, "_counted", False)
        self._counted = True
        if self._slots.bucket is not None and (refusal := self._slots.bucket.refusal()) is not None:
            self._transport.write(refusal)
            return
        self._slots.enter(self)

    def begin(self) -> None:
        self._began, self._took = time.perf_counter(), self._slots.duration()
        if self._streams:
            self._transport.write(_HEAD)
        self._next(1)

    def _next(self, piece: int) -> None:
        # Absolute times: the timers' delays do not add up.
        loop, seconds = asyncio.get_running_loop(), self._took
        if not self._streams:
            loop.call_at(loop.time() + seconds, self._finish, _WHOLE)
        elif piece == PIECES:
            loop.call_later(self._began + seconds - time.perf_counter(), self._finish, _PIECE + _END)
        else:
            due = self._began + seconds * piece / PIECES - time.perf_counter()
            loop.call_later(due, self._send, piece)

    def _send(self, piece: int) -> None:
        self._transport.write(_PIECE)
        self._next(piece + 1)

    def _finish(self, last: bytes) -> None:
        # The time of the slot, and not that of a late timer of a loaded server.
        self._slots.leave(self._took)
        if not self._transport.is_closing():
            self._transport.write(last)


async def main() -> None:
    slots, seconds, *limit = sys.argv[1:]
    numbers = list(map(float, limit))
    limited = None if not numbers else Chance(numbers[0]) if len(numbers) == 1 else Bucket(*numbers)
    slots = Slots(int(slots), list(map(float, seconds.split("-"))), limited)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(slots), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
