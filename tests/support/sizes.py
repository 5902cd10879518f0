"""How much of the largest tests is played: a part on every change, all of it at night (`make nightly`)."""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")

NIGHTLY = "NIGHTLY" in os.environ


def size(usual: Size, nightly: Size) -> Size:
    """Return the size to play now. The usual one reaches each kind of case, the other one many of each."""
    return nightly if NIGHTLY else usual
