"""Put the tables of errors and of kinds of failed turns, from their docstrings, into the page of errors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from docstrings import about, of_fields
from markers import replace_markers, table

from plait.backends import ErrorKind
from plait.runner.domain.task import DEFAULT_RETRY_ON, NEVER_RETRIED
from plait.runner.state.failures import THROTTLING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

BASES = ("PlaitError", "StoreError", "BackendError", "BackendUnavailable")


def errors() -> str:
    """Return a table with a row for each public error, the bases first."""
    rows: list[tuple[str, str, str]] = []
    for package in ("runner", "persistence", "backends"):
        module = import_module(f"plait.{package}")
        names = [
            name
            for name in module.__all__
            if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
        ]
        rows += [
            (f"`{name}`", f"`{package}`", _when(about(getattr(module, name))))
            for name in sorted(names, key=lambda name: (name not in BASES, name))
        ]
    return table(["error", "of", "when"], rows)


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
