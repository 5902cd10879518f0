"""JSON types, and `value`: the frozen values that plait passes on, stores and shows; their JSON form, both ways. Pure.

The form of a value is an object of the fields that differ from their default. A value within a value has the same form,
a tuple is a list, a set a sorted list, a member of an enum its word. What the fields may hold is read from their
annotations, once for each class.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import GeneratorType, NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

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
    fields), and a run makes a dozen values for each task. The dataclass itself takes four times as long to make (1.6
    against 0.4 milliseconds), as it compiles six methods for it: all values share their comparison and their repr.
    """
    made: Any = dataclass(slots=True, repr=False, eq=False)(cls)
    for name, shared in (("__eq__", _equal), ("__hash__", _hash), ("__repr__", _repr)):
        if name not in cls.__dict__:
            setattr(made, name, shared)
    return cast("type[T]", made)


def _equal(one: Any, other: object) -> bool:
    held = _compared(cast("Any", type(one)))
    return held(one) == held(other) if type(other) is type(one) else NotImplemented


def _hash(one: Any) -> int:
    return hash(_compared(cast("Any", type(one)))(one))


def _repr(one: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(one, each.name)!r}" for each in fields(one) if each.repr)
    return f"{type(one).__qualname__}({shown})"


@cache
def _compared(kind: Any) -> Callable[[Any], object]:
    names = [each.name for each in fields(kind) if each.compare]
    return attrgetter(*names) if names else lambda _: ()


def parsed(text: str) -> JsonValue:
    """Return the value of a JSON text. Raises ValueError if it is none."""
    return cast("JsonValue", json.loads(text))


def parsed_object(text: str) -> dict[str, JsonValue]:
    """Return the object of a JSON text. Raises ValueError if it is none."""
    result = parsed(text)
    if not isinstance(result, dict):
        raise ValueError(f"{text[:60]!r} is no JSON object")
    return result


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder for each value."""


def to_json(form: object) -> str:
    """Return the JSON text of `form`, as stored. Raises TypeError or ValueError for values outside JSON, NaN included.

    Non-ASCII text stays unescaped, except text with lone surrogates, which survive only as escapes.
    """
    text = _encode(form)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(form, separators=(",", ":"))
    return text


def as_json(one: object, left_out: frozenset[str] = frozenset()) -> dict[str, JsonValue]:
    """Return the JSON form of the value `one`, without the fields `left_out`."""
    form: dict[str, JsonValue] = {}
    kind: Any = type(one)
    for name, default in _defaults(kind, left_out):
        held = getattr(one, name)
        if held is not default and held != default:
            form[name] = _written(held)
    return form


def _written(held: Any) -> JsonValue:
    if isinstance(held, tuple):
        return [_written(one) for one in cast("tuple[object, ...]", held)]
    if isinstance(held, frozenset):
        return cast("JsonValue", sorted(cast("frozenset[str]", held)))
    if isinstance(held, Enum):
        return cast("JsonValue", held.value)
    return as_json(held) if is_dataclass(held) else cast("JsonValue", held)


@cache
def _defaults(kind: Any, left_out: frozenset[str]) -> Sequence[tuple[str, object]]:
    return [(one.name, one.default) for one in fields(kind) if one.name not in left_out]


def from_json(kind: type[T], form: object) -> T:
    """Return the value of class `kind` with the JSON form `form`. Raises ValueError if there is none."""
    if not isinstance(form, dict):
        raise ValueError(f"{form!r} is no object, so not the form of a {kind.__name__}")
    types = _types(cast("Any", kind))
    try:
        return kind(**{name: _read(types[name], held) for name, held in cast("dict[str, object]", form).items()})
    except (KeyError, TypeError) as error:  # an unknown field, or the absence of one without a default
        raise ValueError(f"not the form of a {kind.__name__}: {error}") from None


@cache
def _types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _read(kind: Any, form: Any) -> Any:
    """Return the value of the annotation `kind` with the form `form`. Raises ValueError or TypeError."""
    if type(form) is kind or (kind is float and type(form) is int) or (kind is NoneType and form is None):
        return form
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:
        for one in inner:
            with suppress(ValueError, TypeError):
                return _read(one, form)
    elif origin is tuple and isinstance(form, list):
        return tuple(_read(inner[0], one) for one in cast("list[object]", form))
    elif origin is Literal and form in inner:
        return inner[inner.index(form)]  # the member of an enum for its word
    elif origin in {abc.Mapping, dict, list} and isinstance(form, dict if origin is abc.Mapping else origin):
        return form  # pyright: ignore[reportUnknownVariableType]
    elif origin is abc.Collection and isinstance(form, list):
        return frozenset(_read(inner[0], one) for one in cast("list[object]", form))
    elif origin is None and is_dataclass(kind):
        return from_json(cast("type[object]", kind), form)
    elif origin is None and issubclass(kind, tuple) and isinstance(form, list):
        items: list[Any] = form  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return cast("Any", kind)(*items)
    elif origin is None and issubclass(kind, Enum):
        return kind(form)
    raise ValueError(f"{form!r} is no {kind}")


def text_of(value: object) -> str:
    """Return `value` as a prompt shows it: text unchanged, None as nothing, everything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_of(value)


def json_of(value: object, indent: int | None = None) -> str:
    """Return `value` as JSON. Raise TypeError, ValueError, or RecursionError if JSON has no form for the value."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, Sequence | GeneratorType):
        return list(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"a {type(value).__name__} is not JSON")
