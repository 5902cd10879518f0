"""Conversion of steps and follow-ups to the JSON stored with a run, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plait.json_form import JsonValue
from plait.task import Retry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Part = TypeVar("Part", bound=DataclassInstance)


def settings_of(part: DataclassInstance) -> dict[str, JsonValue]:
    """Return the fields of `part` that differ from their defaults."""
    given = {field.name: (getattr(part, field.name), field.default) for field in fields(part)}
    return {name: _plain(value) for name, (value, default) in given.items() if value != default}


def made_of(kind: type[Part], settings: Mapping[str, Any]) -> Part:
    """Return the `kind` described by `settings` from `settings_of`. Raises TypeError or ValueError for invalid
    fields.
    """
    given = dict(settings)
    if "retry" in given:
        retry: dict[str, Any] = given["retry"]
        given["retry"] = Retry(**{**retry, "on": cast("Any", frozenset(retry["on"]))})
    return kind(**given)


def _plain(value: Any) -> JsonValue:
    if isinstance(value, Retry):
        return cast("JsonValue", {**asdict(value), "on": sorted(value.on)})
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, JsonValue]", value))
    return cast("JsonValue", value.value if isinstance(value, Enum) else value)
