"""Split a growing file into lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

LONGEST_LINE = 8 * 2**20
"""Bytes; longer lines are left out."""
_PIECE = 2**16  # bytes handed on without a pause


class Lines:
    """Hand each line from `read` on to `on_line`, without its end, until `on_line` returns True: enough."""

    def __init__(self, read: Callable[[int], bytes], on_line: Callable[[bytes], bool]) -> None:
        self._read = read
        self._on_line = on_line
        self._rest = bytearray()
        self._skipping = False
        self.skipped = 0
        """The number of lines left out."""
        self.total = 0
        """Bytes read so far."""
        self.enough = False

    def pump(self) -> int:
        """Read one piece and hand its lines on. Return the bytes of the piece."""
        piece = self._read(_PIECE)
        self.total += len(piece)
        start = 0
        while not self.enough and (end := piece.find(b"\n", start)) >= 0:
            self._line(piece[start:end])
            start = end + 1
        if not self.enough:
            self._keep(piece[start:])
        return len(piece)

    def flush(self) -> None:
        """Hand on the rest behind the last line end as a line."""
        if self._rest or self._skipping:
            self._line(b"")

    def restart(self) -> None:
        """Begin at the start of the file again."""
        self._rest.clear()
        self._skipping = False
        self.total = 0

    def _keep(self, part: bytes) -> None:
        if self._skipping or len(self._rest) + len(part) > LONGEST_LINE:
            self._skipping = True
            self._rest.clear()
        else:
            self._rest += part

    def _line(self, part: bytes) -> None:
        self._keep(part)
        if self._skipping:
            self._skipping = False
            self.skipped += 1
        else:
            self.enough = self._on_line(bytes(self._rest))
        self._rest.clear()
