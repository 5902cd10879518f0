"""`value`: a frozen dataclass at the run-time cost of a plain dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls` like `@dataclass(frozen=True, slots=True)`, but frozen for type checkers only.

    At run time the constructor of a frozen dataclass takes five times as long (1.2 against 0.2 microseconds with nine
    fields), and a run makes a dozen values for each task.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
