"""The filters that a prompt may use, and the budget that keeps any prompt from hanging or filling the memory. Pure.

The sandbox of jinja2 stops leaks, not waste: three nested loops or a chain of `replace` need no attribute at all. So
everything whose cost grows with its values (loops, comparisons, filters) pays from one budget per rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from jinja2 import StrictUndefined, pass_context
from jinja2.runtime import Context, Undefined

from plait.runner.errors import PromptError
from plait.runner.prompts.render import text_of, too_long

P = ParamSpec("P")
T = TypeVar("T")

BUDGET_KEY = " budget"  # no template can spell a name with a space in it
WORK = 5_000_000  # about two seconds of a slow machine
_CHEAP = 16  # characters copied or compared for the price of one step


class Budget:
    """What one rendering may still do: `spend` raises PromptError once it has done too much."""

    def __init__(self, limit: int, work: int = WORK) -> None:
        self.limit = limit
        self._left = work

    def spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise PromptError("the prompt does too much work: its loops or filters go over too many values")

    def check(self, size: int) -> None:
        """Refuse a text of `size` characters before it is made."""
        if size > self.limit:
            raise too_long(self.limit)
        self.spend(size // _CHEAP + 1)

    def charge(self, value: Any) -> None:
        """Pay for one look at every part of `value`."""
        if isinstance(value, str):
            self.spend(len(value) // _CHEAP + 1)
        elif isinstance(value, Mapping):
            for key, part in value.items():  # pyright: ignore[reportUnknownVariableType]
                self.charge(key)
                self.charge(part)
        elif isinstance(value, list | tuple):
            for part in value:  # pyright: ignore[reportUnknownVariableType]
                self.charge(part)
        self.spend(1)


def _paid(function: Callable[Concatenate[Budget, Any, P], T]) -> Callable[Concatenate[Context, Any, P], T]:
    """A filter that pays for its value and gets the budget. An undefined value raises what it has to say."""

    @pass_context
    def call(context: Context, value: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(value, Undefined):
            str(value)
        budget = budget_of(context)
        for part in (value, *args, *kwargs.values()):
            budget.charge(part)
        return function(budget, value, *args, **kwargs)

    return call


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that `context` belongs to."""
    budget: Budget = context.parent[BUDGET_KEY]
    return budget


def _tojson(budget: Budget, value: Any, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= 8:
        raise PromptError(f"tojson: indent must be between 0 and 8, not {indent}")
    text = text_of(value) if indent is None else json.dumps(value, ensure_ascii=False, indent=indent)
    if isinstance(value, str) or value is None:
        text = json.dumps(value, ensure_ascii=False)
    budget.check(len(text))
    return text


def _join(budget: Budget, value: Any, separator: str = "") -> str:
    parts = [text_of(part) for part in _items(value, "join")]
    budget.check(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


def _replace(budget: Budget, value: Any, old: str, new: str) -> str:
    text = text_of(value)
    budget.check(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _indent(budget: Budget, value: Any, width: int = 4, first: bool = False) -> str:
    if not 0 <= width <= 100:
        raise PromptError(f"indent: the width must be between 0 and 100, not {width}")
    text, space = text_of(value), " " * width
    budget.check(len(text) + width * (text.count("\n") + 1))
    return (space if first else "") + text.replace("\n", "\n" + space)


def _truncate(_budget: Budget, value: Any, length: int = 255, killwords: bool = False, end: str = "...") -> str:
    text = text_of(value)
    if length < 0:
        raise PromptError(f"truncate: the length must be at least 0, not {length}")
    if len(text) <= length:
        return text
    room = max(0, length - len(end))
    words = text[:room].rsplit(maxsplit=1)
    ends_in_a_word = not killwords and len(words) == 2 and not text[room].isspace()
    return (words[0] if ends_in_a_word else text[:room]) + end


def _length(_budget: Budget, value: Any) -> int:
    if isinstance(value, str | list | tuple | Mapping):
        return len(value)  # pyright: ignore[reportUnknownArgumentType]
    raise PromptError(f"length needs a text, a list or a mapping, not {_kind(value)}")


def _round(_budget: Budget, value: Any, precision: int = 0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PromptError(f"round needs a number, not {_kind(value)}")
    return round(value, max(-20, min(precision, 20))) if precision else round(value)


def _sort(_budget: Budget, value: Any, reverse: bool = False, attribute: str | None = None) -> list[Any]:
    return sorted(_items(value, "sort"), key=lambda part: _sort_key(part, attribute), reverse=bool(reverse))


def _unique(_budget: Budget, value: Any, attribute: str | None = None) -> list[Any]:
    seen: dict[str, Any] = {}
    for part in _items(value, "unique"):
        seen.setdefault(json.dumps(_part(part, attribute), sort_keys=True), part)
    return list(seen.values())


def _sort_key(part: Any, attribute: str | None) -> Any:
    key = _part(part, attribute)
    return key.casefold() if isinstance(key, str) else key


def _part(part: Any, attribute: str | None) -> Any:
    if attribute is None:
        return part
    if isinstance(part, Mapping) and attribute in part:
        return part[attribute]  # pyright: ignore[reportUnknownVariableType]
    raise PromptError(f"an element of the list has no field {attribute!r}")


def _items(value: Any, name: str) -> list[Any]:
    if isinstance(value, list | tuple | Mapping):
        return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise PromptError(f"{name} needs a list or a mapping, not {_kind(value)}")


def _kind(value: Any) -> str:
    for kind, name in ((str, "a text"), (bool, "true or false"), (int | float, "a number"), (Mapping, "a mapping")):
        if isinstance(value, kind):
            return name
    return "a list" if isinstance(value, list | tuple) else "an empty value"


def _lower(_budget: Budget, value: Any) -> str:
    return text_of(value).lower()


def _upper(_budget: Budget, value: Any) -> str:
    return text_of(value).upper()


def _trim(_budget: Budget, value: Any) -> str:
    return text_of(value).strip()


def _edge(position: int) -> Callable[[Budget, Any], Any]:
    def edge(_budget: Budget, value: Any) -> Any:
        parts = value if isinstance(value, str) else _items(value, "first" if position == 0 else "last")
        return parts[position] if parts else StrictUndefined("the list is empty")

    return edge


def _default(value: Any, default: Any = "", also_empty: bool = False) -> Any:
    return default if isinstance(value, Undefined) or (also_empty and not value) else value


def _field(value: Any, key: Any, shown: str) -> Any:
    """One field of a mapping or one element of a list: keys and indexes alone, so Python's attributes do not exist."""
    if isinstance(value, Undefined):
        return value
    if isinstance(value, Mapping):
        if isinstance(key, str) and key in value:
            return value[key]  # pyright: ignore[reportUnknownVariableType]
        has = ", ".join(str(name) for name in list(value)[:20]) or "no fields"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return StrictUndefined(f"{shown} has no field {key!r}; it has {has}")
    if isinstance(value, list | tuple):
        if isinstance(key, int) and not isinstance(key, bool) and -len(value) <= key < len(value):  # pyright: ignore[reportUnknownArgumentType]
            return value[key]  # pyright: ignore[reportUnknownVariableType]
        return StrictUndefined(f"{shown} is a list of {len(value)}, so it has no {key!r}")  # pyright: ignore[reportUnknownArgumentType]
    return StrictUndefined(f"{shown} is {_kind(value)}, so it has no field {key!r}; fields come with an output_schema")


@pass_context
def _loop(context: Context, value: Any, step: int) -> Iterator[Any]:
    """What a `for` goes over, each round paying `step`, the size of the loop's body."""
    if isinstance(value, Undefined):
        str(value)
    if not isinstance(value, list | tuple | Mapping):
        raise PromptError(f"a for loop goes over a list or a mapping, not {_kind(value)}")
    budget = budget_of(context)
    for part in value:  # pyright: ignore[reportUnknownVariableType]
        budget.spend(step)
        yield part


@pass_context
def _compared(context: Context, value: Any) -> Any:
    budget_of(context).charge(value)
    return value


FILTERS: dict[str, Callable[..., Any]] = {
    "default": _default,
    "first": _paid(_edge(0)),
    "indent": _paid(_indent),
    "join": _paid(_join),
    "last": _paid(_edge(-1)),
    "length": _paid(_length),
    "lower": _paid(_lower),
    "replace": _paid(_replace),
    "round": _paid(_round),
    "sort": _paid(_sort),
    "tojson": _paid(_tojson),
    "trim": _paid(_trim),
    "truncate": _paid(_truncate),
    "unique": _paid(_unique),
    "upper": _paid(_upper),
}
"""What stands after a `|` in a prompt."""

GUARDS: dict[str, Callable[..., Any]] = {"_compared": _compared, "_field": _field, "_loop": _loop}
"""What `plait.runner.prompts.template` puts around fields, loops and comparisons; a prompt cannot name them."""
