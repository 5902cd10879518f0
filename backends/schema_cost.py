"""The cost of checking values against a JSON Schema, found from the schema alone. Pure.

A schema of two kilobytes can stand for more than a million million parts: each definition refers to the next one twice.
A validator visits each part of the schema, with its references replaced by their targets, at most once for each part of
a value. The product of the two numbers of parts therefore bounds the time of a check, and is the cost that
`Cost.of_check` returns. Each target is counted once and its result used again, so counting takes linear time.

Patterns run in linear time, so their cost is the product of their length, repetitions written out, and of the length
of the text. Recursion is counted as jsonschema-rs runs it, which keeps the results of a recursive reference: the schema
is expanded once, and each reference in it that points back once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from plait.backends._schema_validator import json_path

Path: TypeAlias = tuple[str | int, ...]

MAX_SIZE = 20_000
"""Most JSON values in a schema as written. Preparing such a schema takes about 50 ms."""
MAX_PATTERNS = 300_000
"""Most characters in the patterns of a schema as written, repetitions written out."""
MAX_EXPANDED = 1_000_000
"""Most JSON values in a schema after references are replaced by their targets."""
MAX_DEPTH = 100
"""Most levels of schemas within schemas, with references followed."""

_ONE = {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}  # fmt: skip
"""Keywords with a schema; the next two with a list and with a mapping of schemas."""
_LIST = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_MAP = {"dependencies", "dependentSchemas", "patternProperties", "properties"}
_DEFINITIONS = {"$defs", "definitions"}
_REFERENCES = {"$ref", "$dynamicRef", "$recursiveRef"}
_UNEVALUATED = {"unevaluatedItems", "unevaluatedProperties"}
_UNEVALUATED_FACTOR = 3
"""jsonschema-rs visits the parts of a schema three times to find what they evaluated."""
_CLASS_SIZE = 2_000
"""A class such as \\p{L} stands for some hundreds of ranges: as much work as this many characters."""
_PATTERN_UNITS = 100
"""A character of a pattern costs for each character of a text as little as a hundredth part of a visit."""
_BACKTRACKING = 1_000
"""The factor for patterns with lookaround or backreferences, which are tried in more than one way."""
_TOKEN = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


class SchemaProblem(Exception):  # noqa: N818 - becomes the error of the caller
    """A schema cannot be used. `path` is the place in the schema."""

    def __init__(self, message: str, path: Path = ()) -> None:
        super().__init__(message)
        self.path = path

    @property
    def with_place(self) -> str:
        """The problem after the name of the field and the place, in one line."""
        return f"output_schema{f' at {json_path(self.path)}' if self.path else ''}: {self}"


@dataclass(frozen=True, slots=True)
class Cost:
    """The size of a schema, with its references replaced by their targets."""

    parts: int
    """JSON values."""
    patterns: int
    """Characters of patterns, repetitions written out."""
    depth: int
    """Levels of schemas within schemas."""
    recursive: bool
    """Whether the schema contains itself."""

    def of_check(self, text: str, *, backtracks: bool = False) -> int:
        """Return the cost of checking the JSON `text`, in visits of a part of a value by a part of the schema.

        `backtracks` says that a pattern is tried in more than one way.
        """
        visits = self.parts * count_values(text)
        if not self.patterns:
            return visits
        return visits + self.patterns * len(text) * (_BACKTRACKING if backtracks else 1) // _PATTERN_UNITS


def count_values(text: str) -> int:
    """Return a number of values and keys that JSON `text` does not exceed."""
    return 1 + text.count(",") + text.count(":") + text.count("[") + text.count("{")


def measure(schema: Mapping[str, Any]) -> Cost:
    """Return the cost of `schema`.

    Raises SchemaProblem if the schema is too large, too deep or too costly, or has a reference that leaves the schema.
    """
    return _Survey(schema).cost()


@dataclass(slots=True)
class _Unit:
    """A schema that references point to: its own size, without the targets of its references."""

    parts: int = 0
    patterns: int = 0
    depth: int = 0
    references: list[tuple[str, int, int, Path]] = field(default_factory=list[tuple[str, int, int, Path]])
    """For each reference the target, the number of visits in each visit of the unit, the depth, and the place."""


@dataclass(slots=True)
class _Expanded:
    """A unit with its references replaced by their targets, but for those that point back to a unit around them."""

    parts: int
    patterns: int
    depth: int
    loops: int = 0
    """The number of references that point back."""


class _Survey:
    """One reading of a schema. Units are known by the `id` of their objects, which the schema keeps alive."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._units: dict[int, _Unit] = {}
        self._anchors: dict[str, Any] = {}
        self._expanded: dict[int, _Expanded | None] = {}
        self._recursive: dict[int, None] = {}
        self._definitions: list[tuple[Any, Path]] = [(schema, ())]
        self._patterns = 0

    def cost(self) -> Cost:
        """Return the cost of the schema. Raises SchemaProblem."""
        self._require_small()
        while self._definitions:
            self._unit(*self._definitions.pop())
        whole = self._expand(self._root, (), 0)
        for unit in self._units.values():  # also those that nothing refers to: the validator reads them too
            for target, _, _, path in unit.references:
                self._resolve(target, path)
        parts, patterns = whole.parts, whole.patterns
        again = [done for key in self._recursive if (done := self._expanded[key]) is not None]
        parts += whole.loops * sum(one.parts for one in again)
        patterns += whole.loops * sum(one.patterns for one in again)
        return Cost(parts, patterns, whole.depth, bool(self._recursive))

    def _require_small(self) -> None:
        size = 0
        level: list[Any] = [self._root]
        deepest = 0
        while level:
            size, deepest = size + len(level), deepest + 1
            if size > MAX_SIZE:
                raise SchemaProblem(f"the schema has more than {MAX_SIZE:,} values; make it smaller")
            if deepest > 4 * MAX_DEPTH:
                raise _too_deep(())
            level = [inner for value in level for inner in _inside(value)]

    def _unit(self, schema: Any, path: Path) -> _Unit:
        known = self._units.get(id(schema))
        if known is None:
            known = self._units[id(schema)] = _Unit()
            self._read(known, schema, path, 0, 1)
        return known

    def _read(self, unit: _Unit, schema: Any, path: Path, depth: int, times: int) -> None:
        """Add the parts of `schema`, which is visited `times` times in each visit of the unit."""
        unit.depth = max(unit.depth, depth)
        if depth > MAX_DEPTH:
            raise _too_deep(path)
        if not isinstance(schema, dict):
            unit.parts += times
            return
        keywords = cast("dict[str, Any]", schema)
        unit.parts += times
        times *= _UNEVALUATED_FACTOR ** len(_UNEVALUATED & keywords.keys())
        if times > MAX_EXPANDED:
            raise _too_costly(path)
        self._note_names(keywords, path)
        for key, value in keywords.items():
            where = (*path, key)
            if key in _DEFINITIONS and isinstance(value, dict):
                named = cast("dict[str, Any]", value)
                self._definitions += [(one, (*where, name)) for name, one in named.items()]
            elif key in _REFERENCES and isinstance(value, str):
                unit.references.append((value, times, depth, where))
                unit.parts += times
            else:
                if key == "pattern" and isinstance(value, str):
                    self._add_pattern(unit, value, times, where)
                elif key == "patternProperties" and isinstance(value, dict):
                    for pattern in cast("dict[str, Any]", value):
                        self._add_pattern(unit, pattern, times, where)
                schemas = list(_schemas(key, value))
                for name, inner in schemas:
                    self._read(unit, inner, (*where, *name), depth + 1, times)
                if not schemas:
                    unit.parts += times * _count(value)

    def _note_names(self, keywords: Mapping[str, Any], path: Path) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := keywords.get(key), str):
                self._anchors[f"#{name}"] = keywords
        name = keywords.get("$id")
        if isinstance(name, str) and name.startswith("#"):  # the form of an anchor up to draft 7
            self._anchors[name] = keywords
        elif isinstance(name, str) and path:
            raise SchemaProblem("an inner schema cannot have an $id; refer to it as '#/$defs/name'", (*path, "$id"))

    def _add_pattern(self, unit: _Unit, pattern: str, times: int, path: Path) -> None:
        size = _pattern_size(pattern)
        self._patterns += size
        if self._patterns > MAX_PATTERNS:
            message = "the patterns are too large, with their repetitions written out"
            raise SchemaProblem(f"{message}: more than {MAX_PATTERNS:,} characters; make them simpler", path)
        unit.patterns += times * size

    def _resolve(self, target: str, path: Path) -> Any:
        """Return the schema that the reference at `path` points to. Raises SchemaProblem if there is none."""
        if not target.startswith("#"):
            message = f"$ref {_shown(target)} leaves the schema; only references like '#/$defs/name' work"
            raise SchemaProblem(message, path)
        if target in self._anchors:
            return self._anchors[target]
        found: Any = self._root
        steps = unquote(target[1:]).split("/") if target not in {"#", "#/"} else [""]
        for step in steps[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = cast("dict[str, Any]", found)[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(items := _inside(found)):
                found = items[int(name)]
            else:
                steps = ["no"]
                break
        if steps[0] or not isinstance(found, dict | bool):
            raise SchemaProblem(f"$ref {_shown(target)} points to no schema", path)
        return found  # pyright: ignore[reportUnknownVariableType]

    def _expand(self, schema: Any, path: Path, depth: int) -> _Expanded:
        unit = self._unit(schema, path)
        if depth + unit.depth > MAX_DEPTH:
            raise _too_deep(path)
        while self._definitions:  # found in a schema under an unknown keyword
            self._unit(*self._definitions.pop())
        self._expanded[id(schema)] = None
        result = _Expanded(unit.parts, unit.patterns, unit.depth)
        for target, times, at, where in unit.references:
            inner = self._resolve(target, where)
            if id(inner) in self._expanded:
                done = self._expanded[id(inner)]
                if done is None:
                    self._recursive[id(inner)] = None
                    result.loops += times
                    continue
            else:
                done = self._expand(inner, where, depth + at + 1)
            result.parts += times * done.parts
            result.patterns += times * done.patterns
            result.loops += times * done.loops
            result.depth = max(result.depth, at + 1 + done.depth)
            if result.parts + result.patterns // _PATTERN_UNITS > MAX_EXPANDED:
                raise _too_costly(where)
            if depth + result.depth > MAX_DEPTH:
                raise _too_deep(where)
        self._expanded[id(schema)] = result
        return result


def _schemas(key: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas in the value of a keyword, with their places in the value."""
    if key in _ONE and isinstance(value, dict | bool):
        yield (), value
    elif key in _LIST and isinstance(value, list):
        yield from (((index,), one) for index, one in enumerate(_inside(value)))
    elif key in _MAP and isinstance(value, dict):
        yield from (((name,), one) for name, one in cast("dict[str, Any]", value).items())


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*cast("dict[str, Any]", value).values()]
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]


def _count(value: Any) -> int:
    """Return the number of JSON values in `value`."""
    return 1 + sum(map(_count, _inside(value)))


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
            most = min(int(token[2] or token[1]), MAX_PATTERNS)
            last, groups[-1] = last * most, groups[-1] - last
        else:
            last = 1 + _CLASS_SIZE * (word.count("\\p") + word.count("\\P"))
        groups[-1] += last
        if groups[-1] > MAX_PATTERNS:
            return MAX_PATTERNS + 1
    return sum(groups)


def _shown(target: str) -> str:
    return repr(target if len(target) <= 80 else f"{target[:79]}…")


def _too_deep(path: Path) -> SchemaProblem:
    return SchemaProblem(f"the schema is nested more than {MAX_DEPTH} levels deep, references followed", path[:20])


def _too_costly(path: Path) -> SchemaProblem:
    return SchemaProblem(
        f"the schema is too costly to check: with its references replaced by their targets it has more than "
        f"{MAX_EXPANDED:,} values; make it simpler",
        path[:20],
    )
