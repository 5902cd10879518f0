"""A Python file as `ast` sees it: what it imports, where, and when."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Import:
    """One imported module. `names` are what `from module import names` takes."""

    module: str
    names: tuple[str, ...]
    line: int
    lazy: bool
    typing_only: bool

    @property
    def root(self) -> str:
        """The name at the top: `sqlite3`; of ours the package, `runner` for `plait.errors`."""
        first, _, rest = self.module.partition(".")
        return rest.partition(".")[0] if first == "plait" and rest else first


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the checkout, with slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        name = self.path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return name if name.partition(".")[0] == "plait" else f"plait.{name}"

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, lazy=False, typing_only=False))

    def lies_in(self, *patterns: str) -> bool:
        return any(PurePosixPath(self.path).match(pattern) for pattern in patterns)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def nodes(self) -> Iterator[ast.AST]:
        return iter(self._nodes)

    def _imports(self, node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # most of a file, and without a statement in it
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, (), child.lineno, lazy, typing_only)
            elif isinstance(child, ast.ImportFrom):
                names = tuple(alias.name for alias in child.names)
                yield Import(self._absolute(child), names, child.lineno, lazy, typing_only)
            elif isinstance(child, ast.If) and _names(child.test, "TYPE_CHECKING"):
                for part in child.body:
                    yield from self._imports(ast.Module([part], []), lazy=lazy, typing_only=True)
                for part in child.orelse:
                    yield from self._imports(ast.Module([part], []), lazy=lazy, typing_only=typing_only)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._imports(child, lazy=lazy or inside, typing_only=typing_only)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)


def _names(node: ast.AST, name: str) -> bool:
    """Whether `name` is in the expression, as a name or as an attribute."""
    return any(name in {getattr(one, "id", None), getattr(one, "attr", None)} for one in ast.walk(node))
