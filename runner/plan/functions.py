"""A look for the functions named by a plan's backends, without executing user code.

Reported are the errors that `plait run` would meet: a missing file or module, a syntax error, a name that the module
gives to nothing. Nothing is reported if the code may create names dynamically.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from plait.backends.specs.build_backend import FunctionSpec
from plait.runner.domain.dag import nearest

if TYPE_CHECKING:
    from plait.backends.specs.build_backend import BackendSpec

_DYNAMIC = re.compile(
    rb"\b(?:globals|vars|exec|eval|setattr|__getattr__|__dict__|__path__|modules|meta_path|path_hooks)\b|import +\*"
)


def missing_functions(backends: Mapping[str, BackendSpec], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each backend whose function cannot exist, with the reason.

    `folder` is the base of relative paths. Reads the files that define the functions; imports nothing.
    """
    for name, spec in backends.items():
        if isinstance(spec, FunctionSpec) and spec.on is None and (problem := _problem(spec.call, folder)):
            yield name, problem


def _problem(call: str, folder: Path) -> str | None:
    where, _, name = call.rpartition(":")
    if not where.endswith(".py"):
        file, problem = _module_file(where)
        return problem if file is None else _problem_in(file, where, name.partition(".")[0])
    file = folder / where
    if not file.is_file():
        return f"there is no file {file}; write `call` relative to the plan file's folder"
    return _problem_in(file, where, name.partition(".")[0])


def _problem_in(file: Path, where: str, name: str) -> str | None:
    try:
        code = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        return f"{where} is not Python: {error.msg}{line}"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    names = _names(tree)
    if _DYNAMIC.search(code) or name in names:
        return None
    if file.name == "__init__.py" and name in _modules_in([file.parent]):
        return None  # a submodule becomes an attribute of its package at its first import
    return f"{where} has no {name!r}{nearest(name, names)}"


def _names(tree: ast.Module) -> set[str]:
    """Return the names that the code gives to something, within functions and classes too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            words = (getattr(node, field, None) for field in ("id", "name", "asname", "rest"))
            names.update(word.partition(".")[0] for word in words if isinstance(word, str))
    return names


def _module_file(module: str) -> tuple[Path | None, str | None]:
    """Return the source file of `module` (None if unknown), and the problem if there is no such module."""
    head, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(head)
    except (ImportError, ValueError):  # loaded, but without a location
        return None, None
    if spec is None:
        return None, f"there is no module {head!r} here; check its spelling, or install it"
    name = head
    for part in rest:
        folders = spec.submodule_search_locations
        code = Path(spec.origin) if spec.has_location and spec.origin else None
        if folders is None or (code is not None and not (code.is_file() and not _DYNAMIC.search(code.read_bytes()))):
            return None, None  # no package, one in an archive, or one that may hold modules from elsewhere
        name, package = f"{name}.{part}", name
        spec = importlib.machinery.PathFinder.find_spec(name, list(folders))
        if spec is None:
            return None, f"{package} has no module {part!r}{nearest(part, _modules_in(folders))}"
    is_source = isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return (Path(spec.origin) if is_source and spec.origin else None), None


def _modules_in(folders: Iterable[str | Path]) -> list[str]:
    return [file.stem for folder in folders for file in Path(folder).glob("*")]
