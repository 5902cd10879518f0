"""Values of a plan's inputs: defaults, text files, rows, and replacements by `--set`."""

from __future__ import annotations

import glob
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from plait.errors import PlanError, PlanProblem
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest
from plait.runner.plan.plan_mistakes import describe, in_folder
from plait.runner.plan.plan_models import FilesInput, RequiredInput, RowsInput
from plait.runner.plan.plan_positions import Source, read_value
from plait.runner.plan.rows import RowsError, read_rows
from plait.runner.plan.values import spell

_SHORT = 60
"""The maximum length of a value quoted in full in a message."""
MOST_CHARACTERS = 1_000_000
"""The size of a text file that is read as a whole."""
TEXT_SUFFIXES = frozenset({".md", ".txt", ".rst"})


@dataclass(frozen=True, slots=True)
class SuppliedValues:
    """Values supplied in addition to the plan file."""

    folder: Path
    """The base of the plan's relative paths."""
    overrides: Mapping[str, str]
    """Replacement values by input name."""
    stored: Mapping[str, JsonValue] = field(default_factory=dict[str, "JsonValue"])
    """The input values of an existing run."""


def input_values(declared: Mapping[str, Any], given: SuppliedValues, source: Source) -> dict[str, JsonValue]:
    """Return the value of each declared input. Problems are added to `source.problems`, and the value is then None."""
    values: dict[str, JsonValue] = {}
    for name, default in declared.items():
        try:
            values[name] = given.stored[name] if name in given.stored else _value(name, default, given)
        except RowsError as error:
            values[name] = None
            source.problems += error.problems(_where(name, given))
        except ValueError as error:
            values[name] = None
            source.problems.append(_problem(name, str(error), given, source))
    for name in given.overrides.keys() - declared.keys():
        source.problems.append(PlanProblem(no_input(name, declared), f"--set {name}", file=source.file))
    return values


def no_input(name: str, declared: Mapping[str, Any]) -> str:
    """Return the message about a value for an undeclared input."""
    there_are = f"; the plan has {', '.join(map(repr, declared))}" if declared else "; the plan has no inputs"
    return f"there is no input {name!r}{nearest(name, declared) or there_are}"


def _problem(name: str, message: str, given: SuppliedValues, source: Source) -> PlanProblem:
    if name in given.overrides:
        return PlanProblem(message, _where(name, given), file=source.file)
    return source.problem(("inputs", name), message)


def _where(name: str, given: SuppliedValues) -> str:
    return f"--set {name}" if name in given.overrides else spell(("inputs", name))


def _value(name: str, default: Any, given: SuppliedValues) -> JsonValue:
    override = given.overrides.get(name)
    if isinstance(default, FilesInput):
        # Paths in the file are relative to the file; typed paths are relative to the current folder.
        return (
            _read_files(default, given.folder, default.files) if override is None else _typed_files(default, override)
        )
    if isinstance(default, RowsInput):
        base, file = (given.folder, default.rows) if override is None else (Path(), _typed_path(override))
        return read_rows(base, file, default.max_rows)
    if isinstance(default, RequiredInput):
        if override is None:
            raise ValueError(f"this input has no default; give it with --set {name}=VALUE")
        return _required(name, override)
    return cast(JsonValue, default) if override is None else converted(override, default)


def _required(name: str, text: str) -> JsonValue:
    """Return `text`, or its parsed value if it begins like a list or a mapping. Quotes keep such a text as text."""
    begin = text.lstrip()
    if not begin.startswith(("[", "{", '"[', '"{', "'[", "'{")):
        return text
    try:
        return read_value(text)
    except PlanError as error:
        quoted = (
            shlex.quote(f"{name}={json.dumps(text, ensure_ascii=False)}")
            if len(text) <= _SHORT
            else f"'{name}=\"...\"'"
        )
        why = error.problems[0].message
        message = f"{describe(text)} begins like a list or a mapping, but cannot be read as one ({why})"
        raise ValueError(f"{message}; to pass text, write --set {quoted}") from error


def converted(text: str, default: Any) -> JsonValue:
    """Return the value that `text` stands for in place of `default`. Raises ValueError if the types differ."""
    if isinstance(default, str) or default is None:
        return text
    value = _parsed(text)
    # bool first: in Python, True is an int.
    for kind, example in ((bool, "true or false"), (int | float, "3"), (list, "[a, b]"), (dict, "{a: 1}")):
        if isinstance(default, kind):
            if isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool):
                return value
            raise ValueError(f"must be like the default, which is {describe(default)}: write it as {example}")
    return text


def _parsed(text: str) -> JsonValue:
    try:
        return read_value(text)
    except PlanError as error:
        raise ValueError(f"{describe(text)} cannot be read: {error.problems[0].message}") from error


def _typed_files(spec: FilesInput, pattern: str) -> JsonValue:
    return _read_files(spec, Path(), _typed_path(pattern))


def _typed_path(text: str) -> str:
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError(f"the home folder {text.partition('/')[0]!r} is not known; write the full path") from error


def _read_files(spec: FilesInput, base: Path, pattern: str) -> JsonValue:
    if "\0" in pattern:
        raise ValueError("a file name cannot hold U+0000")
    try:
        paths = _matches(base, pattern)
        if not paths:
            raise ValueError(f"no file matches {in_folder(pattern, base)}; name a folder or a glob such as docs/*.md")
        if len(paths) > spec.max_files:
            raise ValueError(
                f"{pattern!r} matches {len(paths)} files, but max_files is {spec.max_files}; raise it or match fewer"
            )
        return [_read_file(path, base, spec.max_chars) for path in paths]
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or pattern!r}: {error.strerror}") from error


def _matches(base: Path, pattern: str) -> list[Path]:
    named = base / pattern
    if named.is_dir():
        found = [path for path in named.iterdir() if path.suffix.lower() in TEXT_SUFFIXES]
    elif named.is_file():
        found = [named]
    else:
        found = [base / match for match in glob.glob(pattern, root_dir=base, recursive=True)]  # noqa: PTH207 - absolute globs too
    return sorted((path for path in found if path.is_file()), key=lambda path: (path.name, str(path)))


def _read_file(path: Path, base: Path, max_chars: int | None) -> JsonValue:
    """Return the text of the file, cut only at `max_chars`. Raises ValueError for a file that is too large."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        text = file.read(MOST_CHARACTERS + 1 if max_chars is None else max_chars)
        if max_chars is None and len(text) > MOST_CHARACTERS:
            size = len(text) + sum(map(len, iter(partial(file.read, MOST_CHARACTERS), "")))
            named = in_folder(path.name, path.parent)
            raise ValueError(
                f"{named} has {size:,} characters, and a file may have {MOST_CHARACTERS:,}; split the file, or set "
                "max_chars to read only its beginning"
            )
    shown = path.relative_to(base) if path.is_relative_to(base) else path
    # Names may contain undecodable bytes, and files may contain U+0000; neither can be stored.
    name, where = (str(part).encode("utf-8", "replace").decode() for part in (path.name, shown.as_posix()))
    return {"name": name, "path": where, "text": text.replace("\0", "\ufffd")}
