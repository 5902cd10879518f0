"""Large settings, cut into pieces that runs with similar settings share.

Theory: settings hold all inputs of a run, such as a thousand rows of a file. A run made like an earlier run has mostly
the same rows. Cuts are therefore chosen by the text before the cut alone, at a comma between two values: an inserted or
changed value changes the pieces around the value, and the cuts behind them stay where they were in the text.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final
from zlib import crc32

_LARGE: Final = 64 * 1024
"""Characters of the longest text that is kept whole, and of the longest piece."""
_LEAST: Final = 4 * 1024
"""Characters of the shortest piece."""
_COMMA: Final = re.compile(r'(?<=[}"\]\w]),(?=[{"\[\w-])', re.ASCII)
_SEEN: Final = 4 * 1024
"""Characters before a comma that decide whether the text is cut there: more than a usual row, whose end may be that of
every row.
"""
_ONE_IN: Final = 16
"""The share of commas at which the text is cut."""


def cut_settings(text: str) -> list[tuple[bytes, int, str]]:
    """Return the pieces of large settings in their order, each with the key in `blobs` and the size in bytes; none for
    settings that are kept whole.
    """
    pieces: list[tuple[bytes, int, str]] = []
    start = 0 if len(text) > _LARGE else len(text)
    while start < len(text):
        end = _end_of_piece(text, start)
        encoded = text[start:end].encode()
        pieces.append((sha256(encoded).digest(), len(encoded), text[start:end]))
        start = end
    return pieces


def _end_of_piece(text: str, start: int) -> int:
    last = start + _LARGE
    for comma in _COMMA.finditer(text, start + _LEAST, last):
        seen = text[comma.start() - _SEEN : comma.start()]
        if crc32(seen.encode()) % _ONE_IN == 0:
            return comma.end()
    return min(last, len(text))
