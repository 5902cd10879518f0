"""Server-sent events, decoded as their bytes arrive. Pure.

The format (WHATWG HTML, "Server-sent events"): lines `field: value`, ended by LF, CR LF or CR; a blank line ends an
event. Only `event` and `data` matter here. Deviating from the format, an event without a blank line at the end of the
stream counts, because some servers forget the line, and an event cut within its JSON is unreadable anyway. A field
`error`, in which llama.cpp sends its errors, is read as the data of an event named `error`.
"""

from __future__ import annotations

from typing import NamedTuple

_MARK = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """One event."""

    name: str
    """The `event` field; empty if there is none."""
    data: bytes
    """The `data` lines, joined by line feeds."""


class EventDecoder:
    """Turns pieces of a stream, cut anywhere, into events. The cost is linear in the size of the stream."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        """Pieces of a line whose end has not arrived."""
        self._name = b""
        self._data: list[bytes] = []
        self._is_first = True
        self._ended_in_cr = False

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Return the events completed by `piece`, the next bytes of the stream."""
        if not piece:
            return []
        if self._ended_in_cr:
            piece = piece.removeprefix(b"\n")  # the second half of a CR LF
        self._ended_in_cr = piece.endswith(b"\r")
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if not cut:
            self._pending.append(piece)
            return []
        if self._pending or cut < len(piece):
            whole = b"".join([*self._pending, piece[:cut]])
            self._pending = [piece[cut:]] if cut < len(piece) else []
            return self._events(whole)
        return self._events(piece)

    def end(self) -> list[ServerEvent]:
        """Return the event that the end of the stream completes, if any."""
        whole = b"".join(self._pending)
        self._pending = []
        return self._events(whole + b"\n\n")

    def _events(self, lines: bytes) -> list[ServerEvent]:
        if self._is_first:
            lines, self._is_first = lines.removeprefix(_MARK), False
        found: list[ServerEvent] = []
        for line in lines.splitlines():
            if line.startswith(b"data: "):  # most lines, so they come first
                self._data.append(line[6:])
            elif not line:
                if self._data:
                    name = self._name.decode(errors="replace") if self._name else ""
                    found.append(ServerEvent(name, b"\n".join(self._data)))
                    self._data = []
                self._name = b""
            else:
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data.append(value.removeprefix(b" "))
                elif field == b"error":
                    self._name = field
                    self._data.append(value.removeprefix(b" "))
                elif field == b"event":
                    self._name = value.removeprefix(b" ")
        return found
