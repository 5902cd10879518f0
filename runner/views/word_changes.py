"""The words that differ between two texts."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Literal, TypedDict

_WORD = re.compile(r"\s*\S+|\s+")


class Piece(TypedDict):
    """A stretch of one or both texts, white space included."""

    change: Literal["kept", "removed", "added"]
    text: str


def word_changes(before: str, after: str) -> list[Piece]:
    """Return the pieces that make `after` out of `before`. White space alone is no difference between two words."""
    old, new = _WORD.findall(before), _WORD.findall(after)
    matcher = SequenceMatcher(None, [word.strip() for word in old], [word.strip() for word in new])
    pieces: list[Piece] = []
    for change, start, end, first, last in matcher.get_opcodes():
        if change == "equal":
            pieces.append({"change": "kept", "text": "".join(new[first:last])})
            continue
        if start < end:
            pieces.append({"change": "removed", "text": "".join(old[start:end])})
        if first < last:
            pieces.append({"change": "added", "text": "".join(new[first:last])})
    return pieces
