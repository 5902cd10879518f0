"""Values of a plan's inputs, and the files of its tasks and prompts: defaults, text files, rows of JSON and tables,
`--set`. A prompt that stands in a file is read with the plan, with what it includes, so that a run needs no file.

An unusable row is reported with its line, or its number in a list or in parquet, and the following rows are still
checked. What a value may be is the same in a file of rows as in a plan.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import date, time
from decimal import Decimal
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, cast
from uuid import UUID

from plait.backends.extras import missing_extra
from plait.errors import PlanError, PlanProblem, PromptError, nearest
from plait.json_form import JsonValue, value
from plait.runner.domain.dag import ROWS_AT_ONCE, RowsFile
from plait.runner.plan.plan_mistakes import describe, in_folder
from plait.runner.plan.plan_models import FilesInput, RequiredInput, RowsInput
from plait.runner.plan.plan_positions import (
    MAX_DEPTH,
    Source,
    Where,
    is_storable,
    nests_too_deep,
    not_json,
    read_value,
    spell,
    too_many_digits,
    unstorable,
)
from plait.runner.prompts.prompt_template import names_used, render
from plait.safe_text import one_line

_SHORT = 60
"""The maximum length of a value quoted in full in a message."""
MOST_CHARACTERS = 1_000_000
"""The size of a text file that is read as a whole, and of a prompt with what it includes."""
TEXT_SUFFIXES = frozenset({".md", ".txt", ".rst"})


@value
class SuppliedValues:
    """What a plan is read with, in addition to its file."""

    folder: Path
    """The base of the plan's relative paths."""
    overrides: Mapping[str, str]
    """Replacement values by input name."""
    stored: Mapping[str, JsonValue] = field(default_factory=dict[str, "JsonValue"])
    """The input values of an existing run."""
    pilot: int | None = None
    """The number of elements to which each list of a pilot keeps."""
    checks_all: bool = False
    """Whether what a run meets later is checked as well: rows that it reads as it goes, functions and folders."""


class FirstRows(list[JsonValue]):
    """The first rows of a `file` of which a run reads the others as it goes. `lines` are those of the file."""

    def __init__(self, rows: Iterable[JsonValue], file: RowsFile, lines: int) -> None:
        super().__init__(rows)
        self.file = file
        self.lines = lines


def input_values(
    declared: Mapping[str, Any], supplied: SuppliedValues, source: Source, most: Mapping[str, int]
) -> dict[str, JsonValue]:
    """Return the value of each declared input: FirstRows for more rows than `most` has for the input. Problems are
    added to `source.problems`, and the value is then None.
    """
    values: dict[str, JsonValue] = {}
    for name, default in declared.items():
        try:
            if name in supplied.stored:
                values[name] = supplied.stored[name]
            else:
                values[name] = _value(name, default, supplied, most.get(name))
        except PlanError as error:
            values[name] = None
            source.problems += error.problems
        except ValueError as error:
            values[name] = None
            if name in supplied.overrides:
                source.problems.append(PlanProblem(str(error), _where(name, supplied), file=source.file))
            else:
                source.complain(("inputs", name), str(error))
    for name in supplied.overrides.keys() - declared.keys():
        source.problems.append(PlanProblem(no_input(name, declared), f"--set {name}", file=source.file))
    return values


def no_input(name: str, declared: Mapping[str, Any]) -> str:
    """Return the message about a value for an undeclared input."""
    there_are = f"; the plan has {', '.join(map(repr, declared))}" if declared else "; the plan has no inputs"
    return f"there is no input {name!r}{nearest(name, declared) or there_are}"


def _where(name: str, supplied: SuppliedValues) -> str:
    return f"--set {name}" if name in supplied.overrides else spell(("inputs", name))


def _value(name: str, default: Any, supplied: SuppliedValues, most: int | None) -> JsonValue:
    override = supplied.overrides.get(name)
    if isinstance(default, FilesInput):
        # Paths in the file are relative to the file; typed paths are relative to the current folder.
        if override is not None:
            return _read_files(default, Path(), _typed_path(override))
        return _read_files(default, supplied.folder, default.files)
    if isinstance(default, RowsInput):
        base, file = (supplied.folder, default.rows) if override is None else (Path(), _typed_path(override))
        return read_rows(base, file, default.max_rows, _where(name, supplied), most, supplied)
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
    try:
        if (folder := base / pattern).is_dir():
            paths = [path for path in folder.iterdir() if path.suffix.lower() in TEXT_SUFFIXES and path.is_file()]
        else:
            paths = _matches(base, pattern)
        if not paths:
            raise ValueError(f"no file matches {in_folder(pattern, base)}; name a folder or a glob such as docs/*.md")
        if len(paths) > spec.max_files:
            raise ValueError(
                f"{pattern!r} matches {len(paths)} files, but max_files is {spec.max_files}; raise it or match fewer"
            )
        paths.sort(key=lambda path: (path.name, str(path)))
        return [_read_file(path, base, spec.max_chars) for path in paths]
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or pattern!r}: {error.strerror}") from error


def _matches(base: Path, pattern: str) -> list[Path]:
    """Return the file with the name `pattern`, or the files that match it as a glob."""
    if "\0" in pattern:
        raise ValueError("a file name cannot hold U+0000")
    named = base / pattern
    matches = glob.glob(pattern, root_dir=base, recursive=True)  # noqa: PTH207 - absolute globs too
    return [named] if named.is_file() else [path for match in matches if (path := base / match).is_file()]


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
    relative = path.relative_to(base) if path.is_relative_to(base) else path
    # Names may contain undecodable bytes, and files may contain U+0000; neither can be stored.
    name, where = (str(part).encode("utf-8", "replace").decode() for part in (path.name, relative.as_posix()))
    return {"name": name, "path": where, "text": text.replace("\0", "\ufffd")}


MAX_BYTES = 64 * 1024 * 1024
MOST_MISTAKES = 20
"""The maximum number of mistakes reported per file: a mistake in one row often recurs in all rows."""
Rows: TypeAlias = "Iterator[tuple[int, JsonValue] | PlanProblem]"
"""The rows of a file with the number of their line, and the mistakes in others, without the name of the file."""
_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_rows(
    folder: Path, name: str, max_rows: int, where: str, most: int | None, supplied: SuppliedValues
) -> list[JsonValue]:
    """Return the rows of the file `name`, relative to `folder`. `where` is the path of the input in the plan.

    Of a file with more rows than `most`, or a large one that may have more, return FirstRows, unless `most` is None.
    Raises PlanError for mistakes in rows, ValueError for a mistake of the whole file.
    """
    path = folder / name
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        ends = ", ".join(_READERS)
        raise ValueError(f"the name of a file of rows must end with {ends}, and {name!r} does not; convert the file")
    is_large = _size(path, folder, name) > MAX_BYTES
    limit = max_rows if most is None else min(max_rows, most)
    if is_large and (limit == max_rows or suffix == ".json"):
        raise ValueError(
            f"{name!r} has more than {MAX_BYTES >> 20} MiB; split the file, or remove fields that no prompt uses"
        )
    rows: list[JsonValue] = []
    if not is_large:
        rows = _checked(row_entries(path), path, where, limit)
        if not rows:
            raise ValueError(f"{name!r} holds no rows")
        if len(rows) <= limit:
            return rows
    file, lines = file_of(path)
    # Lines may be blank, and a row may have several lines.
    if max(len(rows), lines) > max_rows and (count := sum(1 for _ in row_entries(path))) > max_rows:
        raise ValueError(
            f"{name!r} has {count:,} rows, but max_rows is {max_rows:,}; each row makes a task, and each task "
            "costs: raise max_rows, or name a file with fewer rows"
        )
    if suffix == ".json":
        raise ValueError(f"{name!r} has more than {most:,} rows, and a list is read as a whole; write a .jsonl file")
    if supplied.checks_all:
        _checked(row_entries(path), path, where, None)
    first = max(ROWS_AT_ONCE, supplied.pilot or 0)
    rows = _checked(islice(row_entries(path), first), path, where, first)
    return FirstRows(rows, file, lines)


def _checked(entries: Rows, path: Path, where: str, most: int | None) -> list[JsonValue]:
    """Return the usable rows, up to one more than `most`; none, with None. Raises PlanError for mistakes in lines."""
    rows: list[JsonValue] = []
    problems: list[PlanProblem] = []
    for entry in entries:
        if isinstance(entry, PlanProblem):
            problems.append(entry)
        elif most is not None:
            rows.append(entry[1])
        if len(problems) == MOST_MISTAKES or (most is not None and len(rows) > most):
            break
    if len(problems) == MOST_MISTAKES:
        problems.append(replace(problems[-1], message=f"{MOST_MISTAKES} mistakes so far; the rest was not read"))
    if problems:
        raise PlanError(replace(problem, where=where, file=str(path)) for problem in problems)
    return rows


def _size(path: Path, folder: Path, name: str) -> int:
    """Return the size of the file in bytes. Raises ValueError if it cannot be read, or is no regular file."""
    if "\0" in name:
        raise ValueError("a file name cannot hold U+0000")
    try:
        about = path.stat()
        # Never open a pipe: the call would wait for a writer.
        if what := _SPECIAL.get(stat.S_IFMT(about.st_mode)):
            raise ValueError(f"{name!r} is {what}, not a regular file; write the rows to a regular file")
        with path.open("rb"):
            return about.st_size
    except OSError as error:
        raise ValueError(f"cannot read {in_folder(name, folder)}: {error.strerror}; check the path") from error


def file_of(path: Path) -> tuple[RowsFile, int]:
    """Return the file of rows as it is now, and the number of its lines below the header, or of its rows in parquet.
    Raises OSError.
    """
    digest, lines, returns, end = hashlib.sha256(), 0, 0, b"\n"
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
            lines += data.count(b"\n")
            returns += data.count(b"\r")
            end = data[-1:]
        about = os.fstat(file.fileno())
    if path.suffix.lower() == PARQUET:
        lines = int(import_module("pyarrow.parquet").read_metadata(path).num_rows)
    else:
        lines = (lines or returns) + (end not in {b"\n", b"\r"}) - (path.suffix.lower() not in _OF_LINES)
    return RowsFile(str(path.absolute()), digest.hexdigest(), about.st_size, about.st_mtime_ns), lines


def has_changed(file: RowsFile) -> bool:
    """Return whether the rows are others by now. Raises OSError."""
    about = Path(file.path).stat()
    if (about.st_size, about.st_mtime_ns) == (file.size, file.mtime_ns):
        return False
    return about.st_size != file.size or file_of(Path(file.path))[0].sha256 != file.sha256


def row_entries(path: Path, skip: int = 0) -> Generator[tuple[int, JsonValue] | PlanProblem]:
    """Yield the rows of a file, but for the first `skip`, and the mistakes in others, without holding them all. A row
    of a list or of parquet has its own number, any other one that of its line. Raises OSError.
    """
    suffix = path.suffix.lower()
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for entry in _READERS[suffix](path if suffix == PARQUET else file, skip):
                message = None if isinstance(entry, PlanProblem) else _unusable(entry[1])
                if message is None or isinstance(entry, PlanProblem):
                    yield entry
                elif suffix in _OF_NUMBERS:
                    yield PlanProblem(f"row {entry[0]:,}: {message}")
                else:
                    yield PlanProblem(message, line=entry[0])
        except UnicodeDecodeError:
            yield PlanProblem("this is not UTF-8; save the file as UTF-8")


PARQUET = ".parquet"


def _parquet(path: Path, skip: int) -> Rows:
    """Yield the rows, from one group of rows after the other."""
    if lack := missing_extra("a .parquet file of rows", "parquet", "pyarrow"):
        yield PlanProblem(lack)
        return
    parquet: Any = import_module("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                if number + (count := file.metadata.row_group(group).num_rows) <= skip:
                    number += count
                    continue
                for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group]):
                    for row in batch.to_pylist():
                        number += 1
                        if number > skip:
                            yield _parquet_row(number, row)
    except ValueError as error:  # of pyarrow, too
        what = f"the row behind row {number:,} cannot be read" if number else "this is no parquet file"
        yield PlanProblem(f"{what}: {one_line(str(error))}")


def _parquet_row(number: int, row: object) -> tuple[int, JsonValue] | PlanProblem:
    """Return a row as JSON: dates and times, and decimal numbers, as text."""
    try:
        return number, cast("JsonValue", json.loads(json.dumps(row, default=_as_text)))
    except TypeError as error:
        return PlanProblem(f"row {number:,}: {error}; cast the column to text, or leave it out")


def _as_text(value: object) -> str:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")


def _unusable(row: JsonValue) -> str | None:
    """Return why a row cannot be the value of `{{ item }}`; None if it can."""
    if row is None:
        return "this row is null, and for_each cannot use null; remove the row"
    if isinstance(row, dict) and {*map(type, row.values())} == {str}:  # a row of texts, in one search
        texts = cast("Iterable[str]", chain.from_iterable(row.items()))
        if is_storable("".join(texts)):
            return None
    if nests_too_deep(row):
        return _TOO_DEEP
    path, message = next(unstorable(row), ((), None))
    return f"{spell(path)}: {message}" if path else message


def _json_lines(lines: Iterable[str], skip: int) -> Rows:
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        if skip:
            skip -= 1
        else:
            row = _json(line.rstrip(), number)
            yield row if isinstance(row, PlanProblem) else (number, row[0])


def _json_list(lines: Iterable[str], _skip: int) -> Rows:
    text = "".join(lines)
    whole = _json(text if text.strip() else "[]", 1)
    if isinstance(whole, PlanProblem):
        yield whole
    elif isinstance(whole[0], list):
        yield from enumerate(whole[0], 1)
    else:
        message = f"a .json file of rows must hold a list, not {describe(whole[0])}"
        yield PlanProblem(f"{message}; for one value per line, use a .jsonl file")


def _json(text: str, line: int) -> tuple[JsonValue] | PlanProblem:
    """Return the value that `text`, from `line` of a file on, holds, or the mistake."""
    try:
        return (_decode(text),)
    except json.JSONDecodeError as error:
        message = not_json(error)
        if error.msg == "Extra data":
            message = "this is not JSON: more text follows the value; a .jsonl file holds one value per line"
        return PlanProblem(message, line=line + error.lineno - 1, column=error.colno)
    except RecursionError:
        return PlanProblem(_TOO_DEEP, line=line)
    except ValueError as error:
        return PlanProblem(str(error) if "is given twice" in str(error) else too_many_digits(), line=line)


def _without_twice(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Return a mapping of JSON. Raises ValueError for a key that stands twice: Python would silently use the last."""
    if len(keys := dict(pairs)) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {key!r} is given twice")
    return keys


_decode = json.JSONDecoder(object_pairs_hook=_without_twice).decode
_TOO_DEEP = f"this is nested deeper than {MAX_DEPTH} levels"


def _table(lines: Iterable[str], skip: int, *, delimiter: str) -> Rows:
    # Strict: an unclosed quote would otherwise merge all following rows into a single field.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    line = 1
    try:
        for fields in reader:
            # Spreadsheets append empty rows that consist of separators.
            if not any(field.strip() for field in fields):
                pass
            elif not header:
                header = fields
                if message := _wrong_header(header):
                    yield PlanProblem(message, line=line)
                    return
            elif len(fields) != len(header):
                count = f"{len(fields)} field{'s' if len(fields) != 1 else ''}, and the header {len(header)}"
                yield PlanProblem(f"this row has {count}; put a field that contains a separator in quotes", line=line)
            elif skip:
                skip -= 1
            else:
                yield line, dict(zip(header, fields, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        yield _broken(error, line, reader.line_num)


def _wrong_header(header: list[str]) -> str | None:
    if header[0].startswith("\ufeff"):
        return "the header begins with U+FEFF, a second byte order mark; save the file with one, or without"
    if re.fullmatch("sep=.?", "".join(header), re.IGNORECASE | re.DOTALL):
        return "only Excel reads this line; remove the line, so that the first line names the columns"
    if len(header) == 1 and (separator := re.search("[;\t]", header[0])):
        return f"fields are separated by {separator[0]!r} here; a .csv file has commas, a .tsv file has tabs"
    for number, name in enumerate(header, 1):
        if not name.strip():
            return f"column {number} has no name; the first line names each column"
    for name, count in Counter(header).items():
        if count > 1:
            return f"the header has column {describe(name)} twice; give each column a name of its own"
    return next((message for _, message in unstorable(list(header))), None)


def _broken(error: csv.Error, first: int, last: int) -> PlanProblem:
    """Return the mistake of a row that was read from line `first` to line `last`."""
    if "field larger" in str(error):
        size = f"more than {csv.field_size_limit():,} characters"
        return PlanProblem(f"a field has {size}; is a quote missing? A .jsonl file may hold longer texts", line=first)
    if "unexpected end" in str(error):
        return PlanProblem("a quote that is opened in this row is never closed", line=first)
    return PlanProblem(f"{error}; write a quote inside a quoted field twice", line=last)


_OF_LINES = frozenset({".jsonl", ".ndjson"})
"""The ends of the names of files with a row in each line."""
_OF_NUMBERS = frozenset({".json", PARQUET})
"""The ends of the names of files whose rows have numbers in place of lines."""
_READERS: dict[str, Callable[[Any, int], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".csv": partial(_table, delimiter=","),
    ".tsv": partial(_table, delimiter="\t"),
    PARQUET: _parquet,
}


def files_named(folder: Path, written: str, inputs: Mapping[str, JsonValue], item: JsonValue) -> list[Path]:
    """Return the files in `folder` that `written` names for an element `item` of an input. Raises ValueError for a name
    that is no input, and for files that are missing.
    """
    values = {**inputs, "inputs": dict(inputs), **({} if item is None else {"item": item})}
    try:
        if unknown := sorted(names_used(written).names - values.keys()):
            raise ValueError(
                f"{{{{ {unknown[0]} }}}} is no input; files may name inputs, and with for_each over an input "
                "{{ item }}; results of tasks are not known when the files are read"
            )
        pattern = render(written, values)
    except PromptError as error:
        raise ValueError(str(error)) from None
    paths = sorted(_matches(folder, pattern))
    if not paths:
        raise ValueError(f"no file matches {in_folder(pattern, folder)}; check the path")
    return paths


_INCLUDE = re.compile(
    r"""\{%(?P<trims>-?)\s*include\s+(["'])(?P<name>[^\n]*?)\2\s*(?:-%\}\s*|%\})"""
    r"""|\{%[-+]?\s*raw\s*-?%\}.*?(?:\{%[-+]?\s*endraw\s*[-+]?%\}|\Z)""",
    re.DOTALL,
)
"""An include with its name, or a raw block, in which nothing is included. As everywhere in a template, `-` takes the
white space beside it away.
"""


def read_prompt_files(source: Source, folder: Path | None) -> None:
    """Put the texts of files in the place of each `prompt: {file: NAME}` of the plan; names are relative to `folder`,
    and no file outside of it is read. With None, for a plan from elsewhere, none is. Problems are added to
    `source.problems`.
    """
    for path, part in _with_prompts(source.value, ()):
        if not isinstance(prompt := part.get("prompt"), dict):
            continue
        named, at = cast("dict[str, Any]", prompt), (*path, "prompt")
        part["prompt"] = "?"
        name = named.get("file")
        if named.keys() != {"file"} or not isinstance(name, str):
            source.complain(at, "must be a text, or {file: NAME}, the name of a file relative to the plan")
        elif folder is None:
            source.complain(at, "a plan from elsewhere reads no files here; write the prompt into the plan")
        else:
            try:
                pieces = list(_prompt_pieces(folder.resolve(), name))
            except ValueError as error:
                source.complain((*at, "file"), str(error))
                continue
            part["prompt"] = "".join(text for _, _, text in pieces)
            source.file_lines[at] = list(_file_lines(pieces))


def _with_prompts(value: Any, path: Where) -> Iterator[tuple[Where, dict[str, Any]]]:
    """Yield each mapping that may have a prompt, with its path."""
    if not isinstance(value, dict):
        return
    plan = cast("dict[str, Any]", value)
    for key in ("tasks", "workflow", "steps", "follow_ups"):
        entries: Any = plan.get(key)
        if not isinstance(entries, list):
            continue
        for index, entry in enumerate(cast("Sequence[Any]", entries)):
            if key == "follow_ups":
                yield from _with_prompts(entry, (*path, key, index))
            elif isinstance(entry, dict):
                part = cast("dict[str, Any]", entry)
                yield (*path, key, index), part
                yield from _with_prompts(part.get("loop"), (*path, key, index, "loop"))


def _prompt_pieces(folder: Path, whole: str) -> Iterator[tuple[str, int, str]]:
    """Yield pieces of the text: the file, the line at which the piece begins there, and the piece. Raises ValueError
    for a file that cannot be used.
    """
    room = MOST_CHARACTERS

    def read(name: str, within: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
        nonlocal room
        file = (folder / name).resolve() if "\0" not in name else folder
        if not file.is_relative_to(folder):
            raise ValueError(f"the prompt file {name!r} is outside of the plan's folder; move it beside the plan")
        if str(file) in within:
            raise ValueError(f"the prompt file {name!r} includes itself; leave one include out")
        text = _prompt_text(file, name)
        room -= len(text)  # each time, also if it is only made of includes
        if room < 0:
            what = " with what it includes" if within else ""
            raise ValueError(
                f"the prompt file {whole!r}{what} has more than {MOST_CHARACTERS:,} characters; shorten it"
            )
        start, shown = 0, str(file)
        for part in _INCLUDE.finditer(text):
            if part["name"] is not None:
                piece = text[start : part.start()]
                yield shown, text.count("\n", 0, start) + 1, piece.rstrip() if part["trims"] else piece
                yield from read(part["name"], (*within, str(file)))
                start = part.end()
        yield shown, text.count("\n", 0, start) + 1, text[start:]

    yield from read(whole, ())


def _prompt_text(file: Path, name: str) -> str:
    try:
        if not file.is_file():
            raise ValueError(f"there is no prompt file {file}; names are relative to the plan")
        with file.open(encoding="utf-8-sig") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"the prompt file {name!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {name!r} is not UTF-8; save it as UTF-8") from error
    if "\0" in text:
        raise ValueError(f"the prompt file {name!r} is not text: it has a NUL; write it again")
    return text


def _file_lines(pieces: list[tuple[str, int, str]]) -> Iterator[tuple[str, int]]:
    """Yield the file and the line there of each line of the whole text: of its first piece with text."""
    is_new = True
    for file, line, text in pieces:
        for number, part in enumerate(text.splitlines(keepends=True)):
            if is_new:
                yield file, line + number
            is_new = part.endswith("\n")
