"""Inputs that are the rows of a file: one JSON value a line, a list in JSON, or a table with a header.

A row that cannot be used is a mistake with its line, and those behind it are looked at all the same. What JSON may hold
here is what a plan may hold.
"""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from plait.runner.domain.task import JsonValue
from plait.runner.plan.errors import PlanProblem
from plait.runner.plan.messages import describe, in_folder
from plait.runner.plan.row import LINE, Mistake, Rows, checked, too_deep
from plait.runner.plan.schema import MAX_MADE
from plait.runner.plan.tables import table
from plait.runner.plan.values import not_json, too_many_digits

MAX_BYTES = 64 * 1024 * 1024
MOST_MISTAKES = 20
"""Mistakes of one file that are told: whoever makes one in a row tends to make it in all."""
_SPACE = re.compile(r"[ \t\n\r]*")
_SPECIAL = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RowsError(ValueError):
    """Lines of `file` cannot be used."""

    def __init__(self, file: Path, mistakes: list[Mistake]) -> None:
        super().__init__(f"{file} has lines that cannot be used")
        self.file = file
        self.mistakes = mistakes

    def problems(self, where: str) -> list[PlanProblem]:
        """The mistakes as those of a plan, with their places in the file; `where` is the input."""
        return [PlanProblem(one.message, where, one.line, one.column, str(self.file)) for one in self.mistakes]


def read_rows(folder: Path, name: str, max_rows: int) -> list[JsonValue]:
    """The rows of file `name`, which is relative to `folder`. Raises RowsError for what is wrong in its lines, and
    ValueError for what is wrong with the file.
    """
    path = folder / name
    read = _READERS.get(path.suffix.lower())
    if read is None:
        ends = ", ".join(_READERS)
        raise ValueError(f"{name!r} is no file of rows: its name has to end with {ends}; write the rows to such a file")
    found = read(_text(path, folder, name))
    rows: list[JsonValue] = []
    mistakes: list[Mistake] = []
    for row in found:
        if isinstance(row, Mistake):
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
        f"{name!r} has {count:,} rows, but max_rows is {max_rows:,}; each row is a task that costs: raise max_rows, "
        "or name a file with fewer"
    )


def _text(path: Path, folder: Path, name: str) -> str:
    if "\0" in name:
        raise ValueError("a file name cannot hold U+0000")
    try:
        # A pipe is not opened at all: that waits for somebody who writes to it.
        if what := _SPECIAL.get(stat.S_IFMT(path.stat().st_mode)):
            raise ValueError(f"{name!r} is {what}, and rows stand in a regular file; write them to one, and name that")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {in_folder(name, folder)}: {error.strerror}; check the path") from error
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"{name!r} has more than {MAX_BYTES >> 20} MiB; split it, or leave out what prompts do not use"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n") + 1
        raise RowsError(path, [Mistake("this is not UTF-8; save the file as UTF-8", line)]) from error


class _Json:
    """Reads JSON values, and minds keys that stand in a mapping twice, of which Python would take the last."""

    def __init__(self) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._mapping)

    def _mapping(self, pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            self._twice += [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        return mapping

    def read(self, text: str, at: int, line: int) -> tuple[JsonValue | Mistake, int | None]:
        """The value in `text` at `at`, which is in `line`, and where it ends; None where that cannot be told."""
        self._twice.clear()
        try:
            value, end = self._decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            first = text.count("\n", 0, at) + 1
            return Mistake(not_json(error), line + error.lineno - first, error.colno), None
        except RecursionError:
            return too_deep(line), None
        except ValueError:
            return Mistake(too_many_digits(), line), None
        if self._twice:
            return Mistake(f"key {self._twice[0]!r} stands here twice", line), end
        return checked(value, line), end


def _not_null(row: JsonValue | Mistake, line: int) -> JsonValue | Mistake:
    return Mistake("this row is null, which for_each cannot go over; leave it out", line) if row is None else row


def _lines(text: str) -> Rows:
    values = _Json()
    for number, found in enumerate(LINE.finditer(text), 1):
        line = found[0].rstrip("\r\n")
        start = _after_space(line, 0)
        if start == len(line):
            continue
        value, end = values.read(line, start, number)
        if end is not None and (more := _after_space(line, end)) < len(line):
            yield Mistake("this is not JSON: a line holds one value, and here is more", number, more + 1)
        else:
            yield _not_null(value, number)


def _list(text: str) -> Rows:
    if "\r" in text:  # no value of JSON can hold one
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
            if isinstance(value, Mistake)
            else Mistake(
                f"a .json file of rows is a list, and this holds {held}; one value a line is a .jsonl file", line
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
            yield Mistake("this is not JSON: there is more behind the list", 1 + text.count("\n", 0, at))
    else:
        yield Mistake("this is not JSON: a comma or the list's end is missing", line)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


_READERS: dict[str, Callable[[str], Rows]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _list,
    ".csv": partial(table, delimiter=","),
    ".tsv": partial(table, delimiter="\t"),
}
