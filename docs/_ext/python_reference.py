"""Put the public names of a package, each with its docstring, in place of `<!-- names of PACKAGE -->` in a page.

`<!-- calls of PACKAGE.CLASS -->` and `<!-- fields of PACKAGE.CLASS -->` stand for tables with a row for each call or
field of a class, and `<!-- module PACKAGE.NAME -->` for every name of a module.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import sys
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from docstrings import about, of_fields, sentence
from markers import table

if TYPE_CHECKING:
    from types import ModuleType

    from sphinx.application import Sphinx

_MARKER = re.compile(
    r"<!-- (?P<what>names|calls|fields|module)(?: of)? (?P<name>[\w.]+)(?P<shorter> not of plait)? -->"
)
_ADAPTER_CALLS = ("check", "aclose")
_GROUP_MEMBERS = ("placed", "names", "slots")
_MACHINERY = {"now"}
"""Fields of an adapter that only tests fill."""


def reference(package: str, *, without: frozenset[str] = frozenset()) -> str:
    """Return one entry for each name in the `__all__` of `package`, classes before functions before values.

    Modules are left out: a module has a heading and a marker of its own. Raise ValueError if no name is left.
    """
    module = import_module(package)
    found = {name: getattr(module, name) for name in set(module.__all__) - without}
    names = [name for name in found if not inspect.ismodule(found[name])]
    if not names:
        raise ValueError(f"{package} has no further names: remove the heading and the marker")
    names.sort(key=lambda name: (_kind(found[name]), name.lower()))
    return "\n".join(_entry(package, name, found[name]) for name in names)


def _kind(value: object) -> int:
    if inspect.isclass(value):
        return 1 if issubclass(value, Exception) else 0
    return 2 if inspect.isroutine(value) else 3


def _entry(package: str, name: str, value: object) -> str:
    if inspect.isclass(value):
        return _directive("autoclass", f"{package}.{name}", f":members: {', '.join(_members(value))}".strip())
    if inspect.isroutine(value):
        return _directive("autofunction", f"{package}.{name}")
    return _directive("autodata", f"{_home(name, value)}.{name}")


def _directive(kind: str, name: str, *options: str) -> str:
    lines = [f".. {kind}:: {name}", *(f"   {option}" for option in options)]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])


def _members(kind: type) -> list[str]:
    """Return the members to show: all of them, but of an adapter and a group of hosts only those for programs."""
    bases = {one.__name__ for one in kind.__mro__}
    if "HostGroup" in bases:
        return [name for name in _GROUP_MEMBERS if hasattr(kind, name)]
    if not bases & {"AgentBackend", "RemoteBackend", "LocalBackend"}:
        return []
    settings = [one.name for one in dataclasses.fields(kind) if not one.name.startswith("_")]
    calls = [name for name in _ADAPTER_CALLS if hasattr(kind, name)]
    return [name for name in settings if name not in _MACHINERY] + calls


def _home(name: str, value: object) -> str:
    """Return the module that assigns `name` and explains the value below. Raise ValueError if there is none."""
    for home, module in sorted(sys.modules.items()):
        if home.startswith("plait.") and vars(module).get(name) is value and _is_explained(module, name):
            return home
    raise ValueError(f"{name} has no docstring under its assignment, so the reference would show that of its type")


def _is_explained(module: ModuleType, name: str) -> bool:
    body = ast.parse(inspect.getsource(module)).body
    for node, after in pairwise(body):
        targets: list[ast.expr] = [node.target] if isinstance(node, ast.AnnAssign) else []
        targets = node.targets if isinstance(node, ast.Assign) else targets
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False


def calls(name: str) -> str:
    """Return a table with a row for each public method and property of the class `name`."""
    kind = _class(name)
    rows: list[tuple[str, str]] = []
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            rows.append((f"{{py:attr}}`{member} <{name}.{member}>`", sentence(about(value))))
        elif inspect.isfunction(value):
            title = f"{member}({', '.join(_parameters(value))})"
            rows.append((f"{{py:meth}}`{title} <{name}.{member}>`", sentence(about(value))))
    return table(["call", "meaning"], rows)


def _parameters(function: Any) -> list[str]:
    return [
        one.name if one.default is inspect.Parameter.empty else f"{one.name}={one.default!r}"
        for one in inspect.signature(function).parameters.values()
        if one.name != "self"
    ]


def fields(name: str) -> str:
    """Return a table with a row for each field and property of the dataclass `name`."""
    kind: Any = _class(name)
    known = {one.name: one for one in dataclasses.fields(kind)}
    rows = [
        (f"{{py:attr}}`{member} <{name}.{member}>`", _default(known[member]) if member in known else "", text)
        for member, text in of_fields(kind).items()
    ]
    return table(["field", "default", "meaning"], rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return ""
    value, kind = field.default, type(field.default)
    if dataclasses.is_dataclass(kind) and value == kind():
        return f"`{kind.__name__}()`"
    if isinstance(value, frozenset):
        return ", ".join(f"`{one}`" for one in sorted(value))
    return f"`{value.value if isinstance(value, enum.Enum) else repr(value)}`"


def _class(name: str) -> type[Any]:
    package, _, member = name.rpartition(".")
    found = getattr(import_module(package), member)
    assert isinstance(found, type)
    return found


def module_entry(name: str) -> str:
    """Return the entry of the module `name`, a public name of a package."""
    package, _, member = name.rpartition(".")
    home = getattr(import_module(package), member)
    return _directive("automodule", home.__name__, ":members:", ":undoc-members:")


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx passes both
    def text(found: re.Match[str]) -> str:
        if found["what"] != "names":
            return {"calls": calls, "fields": fields, "module": module_entry}[found["what"]](found["name"])
        homes = ["plait", "plait.errors"] if found["shorter"] else []
        without = frozenset(name for home in homes if home != found["name"] for name in import_module(home).__all__)
        return reference(found["name"], without=without)

    source[0] = _MARKER.sub(text, source[0])


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
