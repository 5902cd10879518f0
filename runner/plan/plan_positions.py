"""A plan's text as plain values with their lines and columns, and what a value may be.

YAML is read from the events of its parser, so no dangerous object is ever built: anchors, aliases and tags are refused,
and depth is counted while reading. Only `true`, `false`, `null` and numbers in canonical form are not text; `no`,
`012`, `1:30` and dates stay text as typed.

JSON is read by the json module, because YAML differs in escapes and numbers; the YAML reader only adds the positions.
TOML has no positions besides the path.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeAlias, cast

import yaml

from plait.errors import PlanError, PlanProblem
from plait.json_form import JsonValue

Where: TypeAlias = tuple[str | int, ...]
"""The position of a value in a plan: keys and indexes from the top, such as `("tasks", 3, "depends_on", 0)`."""
MAX_BYTES = 1024 * 1024

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NUMBER = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")
_WORDS: dict[str, JsonValue] = {"true": True, "false": False, "null": None, "": None}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster if libyaml is installed


@dataclass(slots=True)
class Source:
    """A plan as plain values. Positions are (line, column), both from 1."""

    file: str
    value: JsonValue = None
    values: dict[Where, tuple[int, int]] = field(default_factory=dict[Where, tuple[int, int]])
    """The positions of values, by path."""
    keys: dict[Where, tuple[int, int]] = field(default_factory=dict[Where, tuple[int, int]])
    """The positions of keys, by path."""
    blocks: set[Where] = field(default_factory=set[Where])
    """Paths of block texts, which begin on the line after their position."""
    file_lines: dict[Where, list[tuple[str, int]]] = field(default_factory=dict[Where, "list[tuple[str, int]]"])
    """The file and the line there of each line of a prompt from files, by path."""
    problems: list[PlanProblem] = field(default_factory=list[PlanProblem])
    """The mistakes up to now."""
    _wrong: set[Where] = field(default_factory=set[Where])
    """The paths of `problems`."""
    _within: Where = ()
    """The path in the file of a plan that stands within another one; all other paths in the fields begin with it."""

    def below(self, path: Where) -> Source:
        """Return the plan that stands at `path`. Its problems are problems of this one."""
        return replace(self, value=self.at(path), _within=(*self._within, *path))

    @property
    def wrong(self) -> set[Where]:
        """The paths of the mistakes in this plan."""
        start = len(self._within)
        return {path[start:] for path in self._wrong if path[:start] == self._within}

    def position(self, path: Where) -> tuple[int, int] | None:
        """Return the position of the value at `path`; None if unknown."""
        return self.values.get((*self._within, *path))

    def complain(self, path: Where, message: str, *, at_key: bool = False, line: int | None = None) -> None:
        """Add a problem at `path`, or at the closest enclosing value with a position. `line` counts within a text,
        from 1.
        """
        if path and isinstance(path[-1], int) and not isinstance(self.at(path[:-1]), list):
            path = path[:-1]  # a single value in place of a list
        path = (*self._within, *path)
        places = self.file_lines.get(path, [])
        if line and line <= len(places):
            file, line = places[line - 1]
            self.report(path, message, line, None, file)
            return
        position = self.keys.get(path) if at_key else None
        for length in range(len(path), -1, -1):
            position = position or self.values.get(path[:length])
        if position and line and path in self.values:
            first = position[0] + (1 if path in self.blocks else 0)
            position = (first + line - 1, 1) if path in self.blocks or line > 1 else position
        self.report(path, message, *(position or (None, None)))

    def report(self, path: Where, message: str, line: int | None, column: int | None, file: str | None = None) -> None:
        """Add a problem at `path` of the whole file, with its place."""
        self.problems.append(PlanProblem(message, spell(path), line, column, file or self.file))
        self._wrong.add(path)

    def at(self, path: Where) -> Any:
        """Return the value at `path`; None if there is none."""
        return value_at(path, self.value)


def value_at(path: Where, value: Any) -> Any:
    """Return what stands at `path` of `value`; None if nothing does."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def read_source(
    data: str | bytes,
    *,
    format: str = "yaml",  # noqa: A002 - the plain word
    file: str = "plan",
    max_bytes: int | None = MAX_BYTES,
) -> Source:
    """Return the values of `data`, in the format `yaml`, `json` or `toml`, with at most `max_bytes` bytes.

    Raises PlanError if the text is unreadable as a whole.
    """
    text = _decode(data, file, max_bytes)
    source = Source(file)
    if format == "json":
        _read_json(text, source)
    elif format == "toml":
        _read_toml(text, source)
    else:
        _YamlReader(text, source).read()
    for path, message in unstorable(source.value):
        source.complain(path, message)
    return source


def read_value(text: str) -> JsonValue:
    """Return a value written as in a YAML plan, such as `3` or `[a, b]`. Raises PlanError."""
    source = read_source(text)
    if source.problems:
        raise PlanError(source.problems)
    return source.value


def _decode(data: str | bytes, file: str, max_bytes: int | None) -> str:
    size = len(data) if isinstance(data, bytes) else len(data.encode("utf-8", "surrogatepass"))
    if max_bytes is not None and size > max_bytes:
        raise PlanError(
            [PlanProblem(f"a plan may have 1 MiB, this one has {size:,} bytes; move data into input files", file=file)]
        )
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"the file is not UTF-8 (byte {error.start}); save it as UTF-8"
        raise PlanError([PlanProblem(message, line=line, column=1, file=file)]) from error
    text = text.removeprefix("\ufeff")
    if character := _FORBIDDEN.search(text):
        at = character.start()
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        message = f"the control character U+{ord(character[0]):04X} is not allowed; remove it"
        raise PlanError([PlanProblem(message, line=line, column=column, file=file)])
    return text


def _read_json(text: str, source: Source) -> None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        _fail(source, not_json(error), error.lineno, error.colno)
    except RecursionError:
        _fail(source, f"the plan is nested deeper than {MAX_DEPTH} levels")
    except ValueError:
        _fail(source, too_many_digits())
    try:
        # JSON allows tabs as white space and lone surrogates in escapes; YAML accepts neither.
        _YamlReader(_HALF.sub(r"\\u0041", text.replace("\t", " ")), source).read()
    except PlanError as error:
        if any("nested deeper" in problem.message for problem in error.problems):
            raise
    source.value = value


def _read_toml(text: str, source: Source) -> None:
    try:
        source.value = _plain(tomllib.loads(text), 0)
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).partition(" (at ")
        numbers = [int(number) for number in re.findall(r"\d+", position)][:2]
        _fail(source, f"this is not TOML: {message}", *numbers)
    except RecursionError:
        _fail(source, f"the plan is nested deeper than {MAX_DEPTH} levels")
    except ValueError:
        _fail(source, too_many_digits())


def _plain(value: Any, depth: int) -> JsonValue:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return {str(key): _plain(part, depth + 1) for key, part in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_plain(part, depth + 1) for part in value]  # pyright: ignore[reportUnknownVariableType]
    return value if isinstance(value, str | int | float) else str(value)


def _fail(source: Source, message: str, line: int | None = None, column: int | None = None) -> NoReturn:
    raise PlanError([*source.problems, PlanProblem(message, "", line, column, source.file)])


class _YamlReader:
    """Values and their positions from the events of YAML."""

    def __init__(self, text: str, source: Source) -> None:
        self._text = text
        self._source = source
        self._events: Iterator[Any] = cast("Any", yaml).parse(text, Loader=_Loader)

    def read(self) -> None:
        try:
            for event in self._events:
                if isinstance(event, yaml.DocumentStartEvent):
                    if self._source.values:
                        _fail(
                            self._source, "a plan is one document; remove the line '---' and what follows", *_at(event)
                        )
                    self._source.value = self._value(next(self._events), ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            detail = " ".join(part for part in (error.context, error.problem) if part)
            if "nesting depth" in detail and mark:  # the own limit of libyaml, far above MAX_DEPTH
                message = f"the plan is nested deeper than {MAX_DEPTH} levels"
                _fail(self._source, message, mark.line + 1, mark.column + 1)
            if mark and any(line.lstrip(" ").startswith("\t") for line in self._text.split("\n")[mark.line :][:1]):
                detail += "; indent with spaces, not with tabs"
            if mark and error.context_mark and error.context_mark.line != mark.line:
                detail += f"; the mistake begins in line {error.context_mark.line + 1}"
            _fail(self._source, f"this is not YAML: {detail}", *((mark.line + 1, mark.column + 1) if mark else ()))
        except (yaml.YAMLError, ValueError) as error:
            _fail(self._source, f"this is not YAML: {str(error).splitlines()[0]}")

    def _value(self, event: Any, path: Where) -> JsonValue:
        """Return the value that begins with `event`."""
        self._source.values.setdefault(path, _at(event))
        self._refuse_marks(event, path)
        if isinstance(event, yaml.ScalarEvent):
            if event.style == "|":
                self._source.blocks.add(path)
            return event.value if event.style else _resolve(event.value)
        if isinstance(event, yaml.AliasEvent):
            return None
        if len(path) >= MAX_DEPTH:
            _fail(self._source, f"the plan is nested deeper than {MAX_DEPTH} levels", *_at(event))
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        items: list[JsonValue] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._value(event, (*path, len(items))))
        return items

    def _mapping(self, path: Where) -> dict[str, JsonValue]:
        mapping: dict[str, JsonValue] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, path)
            if key in mapping:
                line = self._source.keys[(*path, key)][0]
                self._source.report(
                    (*path, key), f"key {key!r} is given twice; the first is in line {line}", *_at(event)
                )
            self._source.keys.setdefault((*path, key), _at(event))
            # After a key that stands twice, later checks use the first value.
            mapping.setdefault(key, self._value(next(self._events), (*path, key)))
        return mapping

    def _key(self, event: Any, path: Where) -> str:
        if isinstance(event, yaml.ScalarEvent):
            self._refuse_marks(event, path)
            return event.value
        key = f"(key in line {_at(event)[0]})"
        self._source.report(
            path, "a key must be text; a value that begins with {{ has to be put in quotes", *_at(event)
        )
        self._value(event, (*path, key))
        return key

    def _refuse_marks(self, event: Any, path: Where) -> None:
        mark = None
        if isinstance(event, yaml.AliasEvent):
            mark = f"aliases (*{event.anchor})"
        elif event.anchor is not None:
            mark = f"anchors (&{event.anchor})"
        if mark:
            self._source.report(path, f"{mark} are not allowed in plans; write the value out", *_at(event))
        if (tag := getattr(event, "tag", None)) is not None:
            message = f"tags ({tag}) are not allowed in plans; write plain text, numbers, lists"
            self._source.report(path, message, *_at(event))


def _at(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _resolve(text: str) -> JsonValue:
    """Return the value of a plain scalar. Only numbers in canonical form are numbers."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        number = float(text) if "." in text else int(text)
        if str(number) == text:
            return number
    return text


MAX_DEPTH = 50
"""The maximum nesting of lists and mappings."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def is_storable(text: str) -> bool:
    """Return whether a store can keep all characters of `text`."""
    return (text.isascii() and "\0" not in text) or not _UNSTORABLE.search(text)


def unstorable(value: JsonValue, path: Where = ()) -> Iterator[tuple[Where, str]]:
    """Yield the path and a message for each part of `value` that no store can keep. Escapes can express characters that
    a file cannot contain.
    """
    if isinstance(value, str) and not is_storable(value):
        yield path, "a text may not hold U+0000 or a lone surrogate; remove the character"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is not a number in JSON; write a finite number"
    for key, part in _parts(value):
        if isinstance(key, str) and not is_storable(key):
            yield path, "a key may not hold U+0000 or a lone surrogate; remove the character"
        yield from unstorable(part, (*path, key))


def not_json(error: json.JSONDecodeError) -> str:
    """Return the message about a text refused by json."""
    # Some messages of json end before a position, which is reported separately.
    message = f"this is not JSON: {error.msg.removesuffix(' at').removesuffix(' starting')}"
    comma = error.msg.startswith("Expecting") and error.doc[: error.pos].rstrip().endswith(",")
    return f"{message}; remove the comma before it" if comma and error.doc[error.pos :][:1] in {"]", "}"} else message


def too_many_digits() -> str:
    """Return the message about whole numbers too long for Python."""
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text, in quotes"


def nests_too_deep(value: JsonValue, levels: int = MAX_DEPTH) -> bool:
    """Return whether more than `levels` lists and mappings are nested."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(nests_too_deep(part, levels - 1) for _, part in _parts(value))


def _parts(value: JsonValue) -> Iterable[tuple[str | int, JsonValue]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def spell(path: Where) -> str:
    """Return `path` in the form `tasks[3].depends_on[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
