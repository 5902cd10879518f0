"""Values of a plan's inputs and files of its tasks: defaults, text files, rows of JSON and tables, `--set`.

An unusable row is reported with its line, and the following rows are still checked. What a value may be is the same in
a file of rows as in a plan.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

from plait.errors import PlanError, PlanProblem, PromptError
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest
from plait.runner.plan.plan_mistakes import describe, in_folder
from plait.runner.plan.plan_models import MAX_MADE, FilesInput, RequiredInput, RowsInput
from plait.runner.plan.plan_positions import (
    MAX_DEPTH,
    Source,
    nests_too_deep,
    not_json,
    read_value,
    spell,
    too_many_digits,
    unstorable,
)
from plait.runner.prompts.prompt_template import names_used, render
from plait.runner.state.task_files import find_file
from plait.task import TaskFile

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
        if override is not None:
            return _read_files(default, Path(), _typed_path(override))
        return _read_files(default, given.folder, default.files)
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


MAX_BYTES = 64 * 1024 * 1024
MOST_MISTAKES = 20
"""The maximum number of mistakes reported per file: a mistake in one row often recurs in all rows."""
_SPACE = re.compile(r"[ \t\n\r]*")
_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RowsError(ValueError):
    """Raised if lines of `file` are unusable."""

    def __init__(self, file: Path, mistakes: list[RowProblem]) -> None:
        super().__init__(f"{file} has {len(mistakes)} unusable lines; line {mistakes[0].line}: {mistakes[0].message}")
        self.file = file
        self.mistakes = mistakes

    def problems(self, where: str) -> list[PlanProblem]:
        """Return the mistakes as problems of a plan, with positions in the file; `where` is the path of the input."""
        return [PlanProblem(one.message, where, one.line, one.column, str(self.file)) for one in self.mistakes]


def read_rows(folder: Path, name: str, max_rows: int) -> list[JsonValue]:
    """Return the rows of the file `name`, relative to `folder`.

    Raises RowsError for mistakes in lines, ValueError for a mistake of the whole file.
    """
    path = folder / name
    read = _READERS.get(path.suffix.lower())
    if read is None:
        ends = ", ".join(_READERS)
        raise ValueError(f"the name of a file of rows must end with {ends}, and {name!r} does not; convert the file")
    found = read(_text(path, folder, name))
    rows: list[JsonValue] = []
    mistakes: list[RowProblem] = []
    for row in found:
        if isinstance(row, RowProblem):
            mistakes.append(row)
        else:
            rows.append(row)
        if len(mistakes) == MOST_MISTAKES or len(rows) > max_rows:
            break
    if mistakes:
        if len(mistakes) == MOST_MISTAKES:
            mistakes.append(replace(mistakes[-1], message=f"{MOST_MISTAKES} mistakes so far; the rest was not read"))
        raise RowsError(path, mistakes)
    if not rows:
        raise ValueError(f"{name!r} holds no rows")
    if len(rows) > max_rows:
        more = sum(1 for _ in islice(found, MAX_MADE - max_rows))
        raise ValueError(_too_many(name, len(rows) + more, max_rows))
    return rows


def _too_many(name: str, count: int, max_rows: int) -> str:
    if count > MAX_MADE:
        return f"{name!r} has more than {MAX_MADE:,} rows, and a plan may make no more tasks than that; split the file"
    return (
        f"{name!r} has {count:,} rows, but max_rows is {max_rows:,}; each row makes a task, and each task "
        "costs: raise max_rows, or name a file with fewer rows"
    )


def _text(path: Path, folder: Path, name: str) -> str:
    if "\0" in name:
        raise ValueError("a file name cannot hold U+0000")
    try:
        # Never open a pipe: the call would wait for a writer.
        if what := _SPECIAL.get(stat.S_IFMT(path.stat().st_mode)):
            raise ValueError(f"{name!r} is {what}, not a regular file; write the rows to a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {in_folder(name, folder)}: {error.strerror}; check the path") from error
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"{name!r} has more than {MAX_BYTES >> 20} MiB; split the file, or remove fields that no prompt uses"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n") + 1
        raise RowsError(path, [RowProblem("this is not UTF-8; save the file as UTF-8", line)]) from error


class _Json:
    """Reader of JSON values that reports duplicate keys, where Python would silently use the last."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._mapping)

    def _mapping(self, pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            self._twice += [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        return mapping

    def read(self, text: str, at: int, line: int) -> tuple[JsonValue | RowProblem, int | None]:
        """Return the value in `text` at index `at` in line `line`, and the end index (None if unknown)."""
        self._twice.clear()
        try:
            value, end = self._decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            first = text.count("\n", 0, at) + 1
            return RowProblem(not_json(error), line + error.lineno - first, error.colno), None
        except RecursionError:
            return too_deep(line), None
        except ValueError:
            return RowProblem(too_many_digits(), line), None
        if self._twice:
            return RowProblem(f"key {self._twice[0]!r} stands here twice", line), end
        return checked(value, line), end


def _not_null(row: JsonValue | RowProblem, line: int) -> JsonValue | RowProblem:
    return RowProblem("this row is null, and for_each cannot use null; remove the row", line) if row is None else row


def _lines(text: str) -> Rows:
    values = _Json()
    for number, found in enumerate(LINE.finditer(text), 1):
        line = found[0].rstrip("\r\n")
        start = _after_space(line, 0)
        if start == len(line):
            continue
        value, end = values.read(line, start, number)
        if end is not None and (more := _after_space(line, end)) < len(line):
            yield RowProblem(
                "this is not JSON: a line holds one value, and more text follows the value", number, more + 1
            )
        else:
            yield _not_null(value, number)


def _list(text: str) -> Rows:
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # no JSON value can contain CR
    values, position = _Json(), _after_space(text, 0)
    line = 1 + text.count("\n", 0, position)
    if position == len(text):
        return
    if text[position] != "[":
        value, _ = values.read(text, position, line)
        held = describe(value)
        message = f"a .json file of rows must hold a list, not {held}; for one value per line, use a .jsonl file"
        yield value if isinstance(value, RowProblem) else RowProblem(message, line)
        return
    separator = "["
    while separator in {"[", ","}:
        start, position = position, _after_space(text, position + 1)
        line += text.count("\n", start, position)
        if separator == "[" and text.startswith("]", position):
            separator = "]"
            break
        value, end = values.read(text, position, line)
        yield _not_null(value, line)
        if end is None:
            return
        start, position = position, _after_space(text, end)
        line += text.count("\n", start, position)
        separator = text[position : position + 1]
    if separator != "]":
        yield RowProblem("this is not JSON: a comma or the list's end is missing", line)
    elif (end := _after_space(text, position + 1)) < len(text):
        yield RowProblem("this is not JSON: more text follows the list", 1 + text.count("\n", 0, end))


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


LINE = re.compile(r"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")
"""A line with its end: LF, CR or both."""


@dataclass(frozen=True, slots=True)
class RowProblem:
    """A mistake in a line of the file."""

    message: str
    """The mistake, in words."""
    line: int
    """The line, from 1."""
    column: int | None = None
    """The column, from 1; None if unknown."""


Rows: TypeAlias = "Iterator[JsonValue | RowProblem]"


def too_deep(line: int) -> RowProblem:
    """Return the mistake of a row nested too deep."""
    return RowProblem(f"this is nested deeper than {MAX_DEPTH} levels", line)


def checked(value: JsonValue, line: int) -> JsonValue | RowProblem:
    """Return `value`, or the mistake if `value` contains something not allowed in a plan."""
    if nests_too_deep(value):
        return too_deep(line)
    for path, message in unstorable(value):
        return RowProblem(f"{spell(path)}: {message}" if path else message, line)
    return value


def table(text: str, delimiter: str) -> Rows:
    """Yield the rows and mistakes of `text`, with fields separated by `delimiter`."""
    # Strict: an unclosed quote would otherwise merge all following rows into a single field.
    reader = csv.reader((found[0] for found in LINE.finditer(text)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield _broken(error, line, reader.line_num)
            return
        if fields is None:
            return
        # Spreadsheets append empty rows that consist of separators.
        if not any(field.strip() for field in fields):
            continue
        if header is not None:
            yield _row(header, fields, line)
            continue
        header = fields
        if message := _wrong_header(header):
            yield RowProblem(message, line)
            return


def _row(header: list[str], fields: list[str], line: int) -> JsonValue | RowProblem:
    if len(fields) != len(header):
        have = f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
        message = f"this row has {have}, and the header {len(header)}; put a field that contains a separator in quotes"
        return RowProblem(message, line)
    return checked(dict(zip(header, fields, strict=True)), line)


def _wrong_header(header: list[str]) -> str | None:
    if header[0].startswith("\ufeff"):
        return "the header begins with U+FEFF, a second byte order mark; save the file with one, or without"
    if re.fullmatch("sep=.?", "".join(header), re.IGNORECASE | re.DOTALL):
        return "only Excel reads this line; remove the line, so that the first line names the columns"
    if len(header) == 1 and (found := re.search("[;\t]", header[0])):
        return f"fields are separated by {found[0]!r} here; a .csv file has commas, a .tsv file has tabs"
    for number, name in enumerate(header, 1):
        if not name.strip():
            return f"column {number} has no name; the first line names each column"
    for name, count in Counter(header).items():
        if count > 1:
            return f"the header has column {describe(name)} twice; give each column a name of its own"
    return next((message for _, message in unstorable(list(header))), None)


def _broken(error: csv.Error, first: int, last: int) -> RowProblem:
    """Return the mistake of a row that was read from line `first` to line `last`."""
    if "field larger" in str(error):
        most = f"more than {csv.field_size_limit():,} characters"
        return RowProblem(f"a field has {most}; is a quote missing? A .jsonl file may hold longer texts", first)
    if "unexpected end" in str(error):
        return RowProblem("a quote that is opened in this row is never closed", first)
    return RowProblem(f"{error}; write a quote inside a quoted field twice", last)


_READERS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _list,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
}


class PlanFiles:
    """Finds the files of the tasks of a plan in `folder`. Each file is read once."""

    def __init__(self, folder: Path, inputs: Mapping[str, JsonValue]) -> None:
        self._folder = folder
        self._inputs = inputs
        self._found: dict[Path, TaskFile] = {}

    def find(self, written: str, item: JsonValue) -> list[TaskFile]:
        """Return the files that `written` names for an element `item` of an input. Raises ValueError for a name that
        is no input, and for files that are missing or cannot be used.
        """
        pattern = self._rendered(written, item)
        named = self._folder / pattern
        matches = [named] if named.is_file() else [self._folder / one for one in self._glob(pattern)]
        paths = sorted(path for path in matches if path.is_file())
        if not paths:
            raise ValueError(f"no file matches {in_folder(pattern, self._folder)}; check the path")
        for path in paths:
            if path not in self._found:
                self._found[path] = find_file(path)
        return [self._found[path] for path in paths]

    def _glob(self, pattern: str) -> list[str]:
        if "\0" in pattern:
            raise ValueError("a file name cannot hold U+0000")
        return glob.glob(pattern, root_dir=self._folder, recursive=True)  # noqa: PTH207 - absolute globs too

    def _rendered(self, written: str, item: JsonValue) -> str:
        values = {**self._inputs, "inputs": dict(self._inputs), **({} if item is None else {"item": item})}
        try:
            if unknown := sorted(names_used(written).names - values.keys()):
                raise ValueError(
                    f"{{{{ {unknown[0]} }}}} is no input; files may name inputs, and with for_each over an input "
                    "{{ item }}; results of tasks are not known when the files are read"
                )
            return render(written, values)
        except PromptError as error:
            raise ValueError(str(error)) from None
