"""Inputs from the rows of a file: JSON Lines, a JSON list, or a table (CSV, TSV) with a header.

An unusable row is reported with its line, and the following rows are still checked. The restrictions on values are the
restrictions of plans. The table reader at the end of the file reports column and quoting mistakes.
"""

from __future__ import annotations

import csv
import json
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from plait.errors import PlanProblem
from plait.json_form import JsonValue
from plait.runner.plan.plan_mistakes import describe, in_folder
from plait.runner.plan.plan_models import MAX_MADE
from plait.runner.plan.values import MAX_DEPTH, nests_too_deep, not_json, spell, too_many_digits, unstorable

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
    if "\r" in text:  # no JSON value can contain CR
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    values = _Json()
    at = _after_space(text, 0)
    if at == len(text):
        return
    line, counted = 1 + text.count("\n", 0, at), at
    if not text.startswith("[", at):
        value, _ = values.read(text, at, line)
        held = describe(value)
        yield (
            value
            if isinstance(value, RowProblem)
            else RowProblem(
                f"a .json file of rows must hold a list, not {held}; for one value per line, use a .jsonl file", line
            )
        )
        return
    before = "["
    while True:
        at = _after_space(text, at + 1)
        line, counted = line + text.count("\n", counted, at), at
        if before == "[" and text.startswith("]", at):
            break
        value, end = values.read(text, at, line)
        yield _not_null(value, line)
        if end is None:
            return
        at = _after_space(text, end)
        line, counted = line + text.count("\n", counted, at), at
        before = text[at : at + 1]
        if before != ",":
            break
    if text.startswith("]", at):
        at = _after_space(text, at + 1)
        if at < len(text):
            yield RowProblem("this is not JSON: more text follows the list", 1 + text.count("\n", 0, at))
    else:
        yield RowProblem("this is not JSON: a comma or the list's end is missing", line)


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
