"""Docstrings as the tables of the reference need them: of a class, of a method, and of a field under the field."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap


def about(value: object) -> str:
    """Return the first paragraph of the docstring of `value` as one line. Raise ValueError without a docstring."""
    text = inspect.getdoc(value)
    if not text:
        raise ValueError(f"{value!r} has no docstring, so its row in the reference would be empty")
    return _paragraph(text)


def sentence(text: str) -> str:
    """Return the first sentence of `text`."""
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text, maxsplit=1)[0]


def of_fields(kind: type) -> dict[str, str]:
    """Return the first paragraph under each field, member or property of `kind` and its bases, in their order."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("plait."):
            found |= _own_fields(one)
    return found


def _own_fields(kind: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        name = _name(node)
        if name and not name.startswith("_"):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else _text(after)
            found[name] = _paragraph(text) if text else ""
    return found


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    is_property = isinstance(node, ast.FunctionDef) and any(
        isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list
    )
    return node.name if is_property and isinstance(node, ast.FunctionDef) else ""


def _text(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return inspect.cleandoc(value.value) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
