"""JSON types, and `value`: the frozen values that plait passes on, stores and shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, dataclass_transform

JsonValue: TypeAlias = "dict[str, JsonValue] | list[JsonValue] | str | int | float | bool | None"
"""JSON that plait returns."""
JsonInput: TypeAlias = "Mapping[str, JsonInput] | Sequence[JsonInput] | str | int | float | bool | None"
"""JSON that plait accepts, including a `dict[str, str]` or a `list[str]`, which type checkers do not accept as
`JsonValue`. A schema is typed `Mapping[str, object]` instead, the type that mypy infers for a schema held in a
constant.
"""

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Make `cls` like `@dataclass(frozen=True, slots=True)`, but frozen for type checkers only.

    At run time the constructor of a frozen dataclass takes five times as long (1.2 against 0.2 microseconds with nine
    fields), and a run makes a dozen values for each task.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
