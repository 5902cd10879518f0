"""The processor time of work over a text, compared for two lengths: quadratic work is told from linear work on any
machine, whatever else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TIMES = 8


def check_linear(work: Callable[[str], object], unit: str, length: int = 2000) -> None:
    """Fail if `work` takes far more than eight times as long for eight times as much text."""

    def seconds(characters: int) -> float:
        text = unit * (characters // len(unit))
        took: list[float] = []
        for _ in range(3):
            before = time.thread_time()
            work(text)
            took.append(time.thread_time() - before)
            if took[-1] < 0.02:  # too short to be quadratic
                break
        return min(took)

    short, long = seconds(length), seconds(_TIMES * length)
    assert long < 3 * _TIMES * short + 0.05, f"{unit!r}: {short:.4f} s, then {long:.4f} s"
