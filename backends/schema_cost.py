"""The cost of checking values against a JSON Schema, found from the schema alone. Pure.

A schema of two kilobytes can stand for more than a million million parts: each definition refers to the next one twice.
The validator visits each part of the schema, with its references replaced by their targets, at most once for each part
of a value, and keeps the results of references that point back. The product of the two numbers of parts thus bounds the
time of a check. Each target is counted once and its size used again, so counting takes linear time.

The validator holds the interpreter for the whole check, so no other thread could end it: the cost is known before, and
an answer or a schema of too high a cost is refused. Every JSON value in a schema counts as a part, so the time is
usually far below the cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import unquote

from plait.backends.schema_validator import Path, SchemaProblem

MAX_VALUES = 20_000
"""Most JSON values in a schema as written. Preparing such a schema takes about 50 ms."""
MAX_EXPANDED = 1_000_000
"""Most JSON values in a schema after references are replaced by their targets."""
MAX_DEPTH = 200
"""Most levels of JSON in a schema, with references followed."""
MAX_PATTERNS = 300_000
"""Most characters in the patterns of a schema as written, repetitions written out."""
_TOO_DEEP = f"the schema is nested more than {MAX_DEPTH} levels deep, references followed"
_TOO_COSTLY = (
    "the schema is too costly to check: with its references replaced by their targets it has more than "
    f"{MAX_EXPANDED:,} values; make it simpler"
)
_PATTERNS_TOO_LARGE = (
    "the patterns are too large, with their repetitions written out: more than "
    f"{MAX_PATTERNS:,} characters; make them simpler"
)

_Kind: TypeAlias = Literal["schema", "names", "data"]
"""The kind of a value in a schema: a schema, an object of schemas with names for keys, or data."""
_KINDS: dict[object, _Kind] = {
    **dict.fromkeys(
        ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"), "names"
    ),
    **dict.fromkeys(("const", "default", "enum", "examples"), "data"),
}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_UNEVALUATED = {"unevaluatedItems", "unevaluatedProperties"}
_UNEVALUATED_FACTOR = 3
"""The validator visits the parts of such a schema three times, to find the evaluated ones."""
_CLASS_SIZE = 2_000
"""A class such as \\p{L} stands for some hundreds of ranges: as much work as this many characters."""
_PATTERN_UNITS = 10
"""A character of a pattern costs for each character of a text less than a tenth of a visit, unless made to cost more:
then a third.
"""
_TOKEN = re.compile(
    r"\\[pP](?:\{[^}]*(?:\}|\Z)|.)|\\.|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL
)
"""A brace or bracket without an end runs to the end of the pattern, and is not looked at again."""


class Cost(NamedTuple):
    """The size of a schema, with its references replaced by their targets."""

    parts: int
    """JSON values."""
    patterns: int = 0
    """Characters of patterns, repetitions written out."""
    depth: int = 0
    """Levels of JSON."""
    loops: int = 0
    """References that point back to a schema around them, in one recursive schema: 0 unless there is one."""

    def of_check(self, text: str) -> int:
        """Return the cost of checking JSON `text`, in visits of a part of a value by a part of the schema."""
        values = 1 + text.count(",") + text.count(":") + text.count("[") + text.count("{")
        return self.parts * values + self.patterns * len(text) // _PATTERN_UNITS


def measure(schema: Mapping[str, Any]) -> Cost:
    """Return the cost of `schema`.

    Raises SchemaProblem if the schema is too large, too deep or too costly, or has a reference that leaves the schema.
    """
    return _Survey(schema).cost()


class _Survey:
    """One reading of a schema. Targets of references are known by the `id` of their objects, which the schema keeps
    alive.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._values = self._patterns = 0
        self._targets: dict[int, Cost | None] = {}  # None: being counted
        self._recursive: set[int] = set()

    def cost(self) -> Cost:
        """Return the cost of the schema. Raises SchemaProblem."""
        parts, patterns, depth, loops = self._target(self._root, (), 0)
        again = [cost for key in self._recursive if (cost := self._targets[key]) is not None]
        parts += loops * sum(cost.parts for cost in again)
        widest = max((cost.loops for cost in again), default=0)
        return Cost(parts, patterns + loops * sum(cost.patterns for cost in again), depth, widest)

    def _target(self, schema: Any, path: Path, depth: int) -> Cost:
        key = id(schema)
        if key not in self._targets:
            self._targets[key] = None
            self._targets[key] = self._expand(schema, path, "schema", depth)
        cost = self._targets[key]
        if cost is None:
            self._recursive.add(key)
        return cost or Cost(1, loops=1)

    def _expand(self, value: Any, path: Path, kind: _Kind, depth: int) -> Cost:
        """Return the cost of the value at `path`, `depth` levels below the root with references followed."""
        self._values += 1
        _require(self._values <= MAX_VALUES, f"the schema has more than {MAX_VALUES:,} values; make it smaller", ())
        _require(depth <= MAX_DEPTH, _TOO_DEEP, path)
        keywords = cast("dict[str, Any]", value) if kind == "schema" and isinstance(value, dict) else {}
        parts = patterns = deepest = loops = 0
        for key, one, inner in _in(value, kind):
            place = (*path, key)
            word = key if key in keywords else None
            patterns += self._pattern(word, one, place)
            if word in _REFERENCES and isinstance(one, str):
                cost = self._target(*_resolve(self._root, one, place), depth + 1)
            elif word in {"$defs", "definitions"} and isinstance(one, dict):
                for name, schema in cast("dict[str, Any]", one).items():  # they count where references point to them
                    self._target(schema, (*place, name), depth + 2)
                continue
            else:
                moved = word in {"$id", "id"} and bool(path) and isinstance(one, str)
                _require(not moved, f"an inner schema cannot have an {key}; refer to it as '#/$defs/name'", place)
                cost = self._expand(one, place, inner, depth + 1)
            parts, patterns, loops = parts + cost.parts, patterns + cost.patterns, loops + cost.loops
            deepest = max(deepest, 1 + cost.depth)
            _require(depth + deepest <= MAX_DEPTH, _TOO_DEEP, place)
            _require(parts + patterns // _PATTERN_UNITS <= MAX_EXPANDED, _TOO_COSTLY, place)
        times = _UNEVALUATED_FACTOR ** len(_UNEVALUATED & keywords.keys())
        return Cost(1 + parts * times, patterns * times, deepest, loops * times)

    def _pattern(self, word: str | int | None, value: Any, place: Path) -> int:
        """Return the size of the patterns in the value of a keyword."""
        several = word == "patternProperties" and isinstance(value, dict)
        patterns: list[Any] = [*cast("dict[str, Any]", value)] if several else [value] if word == "pattern" else []
        size = sum(_pattern_size(one) for one in patterns if isinstance(one, str))
        self._patterns += size
        _require(self._patterns <= MAX_PATTERNS, _PATTERNS_TOO_LARGE, place)
        return size


def _require(condition: bool, message: str, path: Path) -> None:
    if not condition:
        raise SchemaProblem(message, path)


def _in(value: Any, kind: _Kind) -> Iterator[tuple[str | int, Any, _Kind]]:
    """Yield each value in a part of a schema, with its key and its kind."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        parts = cast("dict[str | int, Any]", value).items()
    elif isinstance(value, list):
        parts = enumerate(cast("list[Any]", value))  # type: ignore[redundant-cast]
    for key, one in parts:
        yield key, one, _KINDS.get(key, "schema") if kind == "schema" else "schema" if kind == "names" else "data"


def _pattern_size(pattern: str) -> int:
    """Return the length of `pattern` with its repetitions written out: 6 for `(a{2}b)` written as `(aab)`, and so on.

    The result is an estimate for patterns that are invalid.
    """
    groups, last = [0], 0
    for token in _TOKEN.finditer(pattern):
        word = token[0]
        if word == "(":
            groups.append(0)
            continue
        if word == ")" and len(groups) > 1:
            last = 1 + groups.pop()
        elif token[1] is not None:
            times = int(min(float(token[2] or token[1]), MAX_PATTERNS + 1))
            last, groups[-1] = last * times, groups[-1] - last
        else:
            last = 1 + _CLASS_SIZE * word.lower().count("\\p")
        groups[-1] = min(groups[-1] + last, MAX_PATTERNS + 1)
    return sum(groups)


def _resolve(root: Any, target: str, path: Path) -> tuple[Any, Path]:
    """Return the schema that the reference at `path` points to, and its place. Raises SchemaProblem without one."""
    shown = repr(target if len(target) <= 80 else f"{target[:79]}…")
    message = f"{path[-1]} {shown} leaves the schema; only references like '#/$defs/name' work"
    _require(target[:2] in {"#", "#/"}, message, path)
    place: Path = ()
    for step in unquote(target).removesuffix("/").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        key = int(name) if isinstance(root, list) and name.isdecimal() else name
        root, place = next((one for at, one, _ in _in(root, "data") if at == key), None), (*place, key)
    _require(isinstance(root, dict | bool), f"{path[-1]} {shown} points to no schema", path)
    return root, place
