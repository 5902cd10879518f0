"""Tables in HTML, in which a notebook shows values of this package."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import islice

MOST_ROWS = 100
_LONGEST_CELL = 200
_CELL = 'style="text-align:left;vertical-align:top"'


def html_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a row of `headings` and at most MOST_ROWS of the `rows`. Every text is escaped, and long
    cells are cut: texts of models must neither run nor fill a page.
    """
    head = "".join(f"<th {_CELL}>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in islice(rows, MOST_ROWS))
    left = len(rows) - MOST_ROWS
    more = f'<tr><td colspan="{len(headings)}" {_CELL}>and {left:,} more tasks</td></tr>' if left > 0 else ""
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}{more}</table>"


def _cell(text: str) -> str:
    shown = text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 1]}…"
    return f"<td {_CELL}>{escape(shown)}</td>"
