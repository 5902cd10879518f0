"""Names, values, and errors that the modules of this package share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from plait.errors import PromptError
from plait.json_form import JsonInput, value

CONSTANTS: frozenset[str] = frozenset({"true", "false", "none", "True", "False", "None"})
"""Names that are values in a prompt: a task or an input of that name would silently never be inserted."""
RESERVED_NAMES: frozenset[str] = frozenset({"inputs", "results", "item", *CONSTANTS})
"""Names that never stand for a task: the inputs of the run, all upstream results by id, the element of a `for_each`,
and the constants.
"""
STEP = r"""\. (?:[A-Za-z_]\w*|0|[1-9]\d{0,8}) | \[ (?:0|-?[1-9]\d{0,8}|"[^"\\\r\n]*"|'[^'\\\r\n]*') \]"""
"""One field or element, for a verbose pattern."""
DEFAULT_LIMIT = 1_000_000
"""Characters of a rendered prompt."""
_MOST_SHOWN = 20


@value
class PromptNames:
    """The names that a prompt uses."""

    names: frozenset[str] = frozenset()
    """Every free top-level name, reserved names included."""
    results: frozenset[str] = frozenset()
    """The constant keys of `results`, such as `my-task` in `{{ results["my-task"] }}`."""
    inputs: frozenset[str] = frozenset()
    """The constant keys of `inputs`."""
    item: frozenset[str] = frozenset()
    """The fields of `item` without which the prompt cannot be rendered, whatever the other values are."""


class NoResult(str):
    """The result of a task that was skipped or failed softly: an empty text, of which every field is an empty text too,
    and which is neither less nor greater than any value.
    """

    __slots__ = ()

    def __lt__(self, _other: object) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__


class _FieldsOfResult(dict[str, Any]):
    """A structured result: see `structured`."""


class _ListOfResult(list[Any]):
    """A structured result: see `structured`."""


def structured(value: JsonInput) -> JsonInput:
    """Return the result `value` of a task for use in a template. A mapping or a list is its own field `data`, unless it
    has a field of that name, as `data` is the name of a structured result in Python.
    """
    if isinstance(value, Mapping):
        return _FieldsOfResult(value)
    return _ListOfResult(value) if isinstance(value, list | tuple) else value


def field_of(value: Any, key: object) -> Any:
    """Return the field of a mapping or the element of a list; Python attributes of a value do not exist for a prompt.

    Raise LookupError with the end of a sentence that starts with the name of the value.
    """
    if isinstance(value, NoResult):
        return value
    if key == "data" and isinstance(value, _FieldsOfResult | _ListOfResult) and "data" not in value:
        return value
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, Any]", value)
        if isinstance(key, str) and key in fields:
            return fields[key]
        names = [str(name) for name in fields]
        raise LookupError(f"has no field {key!r}; it has {', '.join(names[:_MOST_SHOWN]) or 'no fields'}")
    if isinstance(value, list | tuple):
        elements = cast("Sequence[Any]", value)
        size = len(elements)
        if isinstance(key, int) and not isinstance(key, bool) and -size <= key < size:
            return elements[key]
        raise LookupError(f"is a list of {size}, so it has no {key!r}")
    raise LookupError(f"is {_kind(value)}, so it has no field {key!r}; fields come with an output_schema")


def by_key(name: str) -> str:
    """Return how a prompt writes `name`, which is no plain name."""
    return f'write {{{{ results["{name}"] }}}} for a task, {{{{ inputs["{name}"] }}}} for an input'


def too_long(limit: int) -> PromptError:
    """Return the error for a prompt of more than `limit` characters."""
    return PromptError(
        f"the rendered prompt has more than {limit:,} characters; insert less, for example with `| truncate(2000)`"
    )


def unknown_name(name: str, values: Mapping[str, JsonInput]) -> str:
    """Return the message about a name that is not in `values`."""
    names = sorted(key for key in values if key.isidentifier())
    return f"unknown name {name!r}; the prompt may use {', '.join(names[:_MOST_SHOWN]) or 'no names at all'}"


def first_of(mistakes: Sequence[PromptError]) -> PromptError:
    """Return the first mistake as a new error: a cached error would collect a traceback with each raise."""
    return PromptError(str(mistakes[0]), mistakes[0].line)


def _kind(value: object) -> str:
    for kind, name in ((str, "a text"), (bool, "true or false"), (int | float, "a number")):
        if isinstance(value, kind):
            return name
    return "an empty value"
