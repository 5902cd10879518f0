"""Lines out of a file that grows, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

LONGEST_LINE = 8 * 2**20
"""Bytes; what is longer than that is left out."""
_PIECE = 2**16  # bytes; what is handed on without a pause


class Lines:
    """Hands on each line that `read` brings, without its end, until `on_line` says True: enough."""

    def __init__(self, read: Callable[[int], bytes], on_line: Callable[[bytes], bool]) -> None:
        self._read = read
        self._on_line = on_line
        self._rest = bytearray()
        self._skipping = False
        self.skipped = 0
        """Lines that were left out."""
        self.total = 0
        """Bytes read so far."""
        self.enough = False

    def pump(self) -> int:
        """Read one piece and hand its lines on; how many bytes it had."""
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
        """What stands behind the last line's end is a line, too."""
        if self._rest or self._skipping:
            self._line(b"")

    def restart(self) -> None:
        """The file begins anew."""
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
