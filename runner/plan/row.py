"""One row of a file: its value, or what is wrong with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from plait.runner.domain.task import JsonValue
from plait.runner.plan.errors import spell
from plait.runner.plan.values import MAX_DEPTH, nests_too_deep, unstorable

LINE = re.compile(r"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")
"""A line with its end, which is LF, CR or both."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong in a line of the file."""

    message: str
    line: int
    column: int | None = None


Rows: TypeAlias = "Iterator[JsonValue | Mistake]"


def too_deep(line: int) -> Mistake:
    """What is said of a row that is nested too deep."""
    return Mistake(f"this is nested deeper than {MAX_DEPTH} levels", line)


def checked(value: JsonValue, line: int) -> JsonValue | Mistake:
    """`value`, which stands in `line`, or what it holds that a plan may not hold."""
    if nests_too_deep(value):
        return too_deep(line)
    for path, message in unstorable(value):
        return Mistake(f"{spell(path)}: {message}" if path else message, line)
    return value
