"""Markers in pages: a comment such as `<!-- events -->`, in whose place an extension puts a generated text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def replace_markers(app: Sphinx, texts: Mapping[str, Callable[[], str]]) -> dict[str, bool]:
    """Put the text of each function in place of the marker with its name, in every page. Return the metadata of an
    extension.
    """

    def fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx passes all three
        for name, text in texts.items():
            marker = f"<!-- {name} -->"
            if marker in source[0]:
                source[0] = source[0].replace(marker, text())

    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. Raise ValueError for a table without rows."""
    lines = [_row([cell(one) for one in row]) for row in rows]
    if not lines:
        raise ValueError(f"the table {' | '.join(header)} has no rows")
    return "\n".join([_row(header), "|" + "---|" * len(header), *lines])


def cell(text: str) -> str:
    """Return `text` as the cell of a table: in one line, and with everything but code and links escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    shown = (one if one.startswith("`") else one.replace("<", "&lt;").replace("*", r"\*") for one in parts)
    return "".join(shown).replace("|", r"\|")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
