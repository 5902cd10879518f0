"""The rows of a table, whose first line names the columns: CSV and TSV. Pure."""

from __future__ import annotations

import csv
import re
from collections import Counter

from plait.runner.domain.task import JsonValue
from plait.runner.plan.messages import describe
from plait.runner.plan.row import LINE, Mistake, Rows, checked
from plait.runner.plan.values import unstorable


def table(text: str, delimiter: str) -> Rows:
    """The rows of `text`, whose fields are separated by `delimiter`, and its mistakes."""
    # Strict, because a quote that is never closed would else swallow all rows behind it into one field.
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
        # Spreadsheets write the rows below the last one as separators alone.
        if not any(field.strip() for field in fields):
            continue
        if header is not None:
            yield _row(header, fields, line)
            continue
        header = fields
        if message := _wrong_header(header):
            yield Mistake(message, line)
            return


def _row(header: list[str], fields: list[str], line: int) -> JsonValue | Mistake:
    if len(fields) != len(header):
        have = f"{len(fields)} field{'s' if len(fields) != 1 else ''}"
        message = f"this row has {have}, and the header {len(header)}; a field with a separator in it stands in quotes"
        return Mistake(message, line)
    return checked(dict(zip(header, fields, strict=True)), line)


def _wrong_header(header: list[str]) -> str | None:
    if header[0].startswith("\ufeff"):
        return "the header begins with U+FEFF, a second byte order mark; save the file with one, or without"
    if re.fullmatch("sep=.?", "".join(header), re.IGNORECASE | re.DOTALL):
        return "this line is for Excel alone; remove it, so that the first line names the columns"
    if len(header) == 1 and (found := re.search("[;\t]", header[0])):
        return f"fields are separated by {found[0]!r} here; a .csv file has commas, a .tsv file has tabs"
    for number, name in enumerate(header, 1):
        if not name.strip():
            return f"column {number} has no name; the first line names each column"
    for name, count in Counter(header).items():
        if count > 1:
            return f"the header has column {describe(name)} twice; give each column a name of its own"
    return next((message for _, message in unstorable(list(header))), None)


def _broken(error: csv.Error, first: int, last: int) -> Mistake:
    """What is wrong with a row that reaches from line `first` to line `last`, as far as it was read."""
    if "field larger" in str(error):
        most = f"more than {csv.field_size_limit():,} characters"
        return Mistake(f"a field has {most}; is a quote missing? A .jsonl file may hold longer texts", first)
    if "unexpected end" in str(error):
        return Mistake("a quote that is opened in this row is never closed", first)
    return Mistake(f"{error}; a quote within a field in quotes is written twice", last)
