"""Put the tables of errors and of kinds of failed turns, from their docstrings, into the page of errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docstrings import about, of_fields
from markers import replace_markers, table

import plait.errors
from plait.errors import ErrorKind
from plait.runner.state.run_state import THROTTLING
from plait.task import DEFAULT_RETRY_ON, NEVER_RETRIED

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def errors() -> str:
    """Return a table with a row for each error that a caller can catch, in the order of `plait.errors`."""
    rows = [
        (f"`{name}`", f"`{one.word}`", str(one.exit_code), str(one.http_status), _when(about(one)))
        for name, one in vars(plait.errors).items()
        if isinstance(one, type) and issubclass(one, plait.errors.PlaitError)
    ]
    return table(["error", "word", "exit code", "HTTP", "when"], rows)


def _when(text: str) -> str:
    text = text.removeprefix("Raised if ")
    return text[:1].upper() + text[1:]


def kinds() -> str:
    """Return a table with a row for each kind of failed turn."""
    texts = of_fields(ErrorKind)
    return table(
        ["kind", "when", "tried again by default"], [(f"`{one}`", texts[one.name], _retried(one)) for one in ErrorKind]
    )


def _retried(kind: ErrorKind) -> str:
    if kind in NEVER_RETRIED:
        return "never"
    if kind in THROTTLING:
        return "yes, beside the attempts"
    return "yes" if kind in DEFAULT_RETRY_ON else "no"


def setup(app: Sphinx) -> dict[str, bool]:
    return replace_markers(app, {"errors": errors, "kinds of errors": kinds})
