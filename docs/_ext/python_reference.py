"""Put the public names of a package, each with its docstring, in place of `<!-- names of PACKAGE -->` in a page."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from sphinx.application import Sphinx

_MARKER = re.compile(r"<!-- names of (?P<package>[\w.]+)(?P<shorter> not of plait)? -->")


def reference(package: str, *, without: frozenset[str] = frozenset()) -> str:
    """Return one entry for each name in the `__all__` of `package`, classes before functions before values."""
    module = import_module(package)
    names = sorted(set(module.__all__) - without, key=lambda name: (_kind(module, name), name.lower()))
    return "\n".join(_entry(package, module, name) for name in names)


def _kind(module: ModuleType, name: str) -> int:
    value = getattr(module, name)
    if inspect.isclass(value):
        return 1 if issubclass(value, Exception) else 0
    return 2 if callable(value) else 3


def _entry(package: str, module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if inspect.ismodule(value):
        return f"```{{eval-rst}}\n.. automodule:: {value.__name__}\n   :members:\n   :undoc-members:\n```\n"
    if inspect.isclass(value):
        return f"```{{eval-rst}}\n.. autoclass:: {package}.{name}\n   :members:\n```\n"
    kind = "autofunction" if callable(value) else "autodata"
    return f"```{{eval-rst}}\n.. {kind}:: {package}.{name}\n```\n"


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx passes both
    def entries(found: re.Match[str]) -> str:
        without = frozenset(import_module("plait").__all__) if found["shorter"] else frozenset[str]()
        return reference(found["package"], without=without)

    source[0] = _MARKER.sub(entries, source[0])


def _plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001
    """Write the code in a docstring as reStructuredText has it, and escape what would be markup in the prose."""
    text = "\n".join(lines)
    parts = re.split(r"(`[^`]*`)", text)
    lines[:] = "".join(
        f"`{part}`" if part[:1] == "`" else re.sub(r"([*|]|_(?![A-Za-z0-9]))", r"\\\1", part) for part in parts
    ).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _plain)
    return {"parallel_read_safe": True}
