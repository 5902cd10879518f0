"""Static lookup of the functions named by a plan's backends, without executing user code.

Reported are the errors that `plait run` would meet: a missing file or module, a syntax error, a name missing from the
module. Nothing is reported if the code may create names dynamically.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.backends.spec.build import FunctionSpec
from plait.runner.domain.dag import nearest

if TYPE_CHECKING:
    from plait.backends.spec.build import BackendSpec

_MAKES_NAMES = frozenset({"globals", "vars", "exec", "eval", "setattr", "__getattr__", "__dict__", "modules"})
_MOVES_MODULES = frozenset({"__path__", "modules", "meta_path", "path_hooks"})


def missing_functions(backends: Mapping[str, BackendSpec], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each backend whose function cannot exist, with the reason.

    `folder` is the base of relative paths. Reads the files that define the functions; imports nothing.
    """
    for name, spec in backends.items():
        if isinstance(spec, FunctionSpec) and spec.on is None and (problem := _problem(spec.call, folder)):
            yield name, problem


def _problem(call: str, folder: Path) -> str | None:
    where, _, name = call.rpartition(":")
    name = name.partition(".")[0]
    if not where.endswith(".py"):
        file, problem = _module_file(where)
        return problem if file is None else _problem_in(file, where, name)
    file = folder / where
    if not file.is_file():
        return f"there is no file {file}; write `call` relative to the plan file's folder"
    return _problem_in(file, where, name)


def _problem_in(file: Path, where: str, name: str) -> str | None:
    try:
        names = _names(_parsed(file))
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        return f"{where} is not Python: {error.msg}{line}"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    if names is None or name in names:
        return None
    if file.name == "__init__.py" and name in _modules_in([file.parent]):
        return None  # a submodule becomes an attribute of its package at its first import
    return f"{where} has no {name!r}{nearest(name, names)}"


def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(file.read_bytes(), filename=str(file))


def _module_file(module: str) -> tuple[Path | None, str | None]:
    """Return the source file of `module` (None if unknown), and the problem if there is no such module."""
    head, *rest = module.split(".")
    spec = _top_level(head)
    if spec is None:
        return None, f"there is no module {head!r} here; check its spelling, or install it"
    name = head
    for part in rest:
        folders = spec.submodule_search_locations
        if folders is None or _may_move_modules(spec):
            return None, None
        name, package = f"{name}.{part}", name
        spec = importlib.machinery.PathFinder.find_spec(name, list(folders))
        if spec is None:
            return None, f"{package} has no module {part!r}{nearest(part, _modules_in(folders))}"
    is_source = isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return (Path(spec.origin) if is_source and spec.origin else None), None


def _top_level(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # loaded, but without a location
        return importlib.machinery.ModuleSpec(name, None)


def _may_move_modules(spec: importlib.machinery.ModuleSpec) -> bool:
    """Return whether the package may contain modules from outside its folder."""
    if spec.loader is None or spec.origin is None:
        return False
    try:
        return not _MOVES_MODULES.isdisjoint(_words(_parsed(Path(spec.origin))))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return True


def _modules_in(folders: Iterable[str | Path]) -> list[str]:
    return [file.stem for folder in folders for file in Path(folder).glob("*")]


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield every name mentioned in the code."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.FunctionDef(name=word) | ast.alias(name=word):
                yield word
            case _:
                pass


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that the module may define, in doubt too many; None if undecidable."""
    if not _MAKES_NAMES.isdisjoint(_words(tree)):
        return None
    names: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return None
        names.update(_bound_by(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            # Inside functions and classes, only `global` defines a name of the module.
            waiting.extend(part for part in ast.walk(node) if isinstance(part, ast.Global))
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return names


def _bound_by(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name.partition(".")[0] for alias in aliases]
        case ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
            return [name]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [name]
        case ast.Global(names=names):
            return names
        case _:
            return []
