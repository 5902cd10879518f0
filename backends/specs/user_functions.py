"""Python functions of the user's own, named by an entry of a plan as `file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import BackendUnavailable
from plait.safe_text import one_line


def named_function(call: str, folder: Path) -> Any:
    """Return what `call` names: `file.py:name`, with the file in `folder`, or `package.module:name`. Raises
    BackendUnavailable with the reason if it cannot be loaded.
    """
    where, _, name = call.rpartition(":")
    try:
        module = _load_file(folder / where) if where.endswith(".py") else importlib.import_module(where)
    except BackendUnavailable:
        raise
    except Exception as exc:  # whatever the user's module raises while it is imported
        raise BackendUnavailable(f"cannot import {where}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise BackendUnavailable(f"{call}: {where} has no {name!r}") from None


def _load_file(path: Path) -> Any:
    path = path.resolve()
    # One module per file, even for several functions, as with an import.
    name = f"plait_functions_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise BackendUnavailable(f"there is no file {path}; write `call` relative to the plan file's folder")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with importable_siblings(path.parent):
            spec.loader.exec_module(module)
    except Exception as exc:  # whatever the user's file raises while it is loaded
        del sys.modules[name]
        raise BackendUnavailable(f"cannot load {path}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    return module


# While a file named by `call` is loaded, its folder is the first entry of `sys.path`. Afterwards the entry and the
# modules of the folder are gone from `sys.path` and `sys.modules`: the next plan may have a module of the same name.

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_lock = threading.RLock()
_loaded: dict[Path, dict[str, ModuleType]] = {}
"""The modules that files of a folder have imported from the folder, so that two files share one module."""


@contextmanager
def importable_siblings(folder: Path) -> Generator[None]:
    """Return a context in which the modules in `folder` can be imported. `folder` is absolute and resolved.

    Outside the context, the modules are only reachable through the names that the importing files bound. A module of
    the same name that was imported before from another place, Python's own modules excepted, is set aside meanwhile.
    """
    with _lock:
        aside = {name: sys.modules.pop(name) for name in _hidden_by(folder)}
        before = set(sys.modules)
        sys.modules.update(_loaded.get(folder, {}))
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            with suppress(ValueError):  # the loaded file may have removed the entry itself
                sys.path.remove(str(folder))
            imported = {
                name: sys.modules[name] for name in set(sys.modules) - before if _is_in(folder, sys.modules[name])
            }
            _loaded.setdefault(folder, {}).update(imported)
            for name in imported:
                del sys.modules[name]
            sys.modules.update(aside)


def _hidden_by(folder: Path) -> list[str]:
    """Return the names of the imported modules that a module of `folder` has to replace."""
    there = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    there -= sys.stdlib_module_names | {"plait"}
    return [name for name, one in sys.modules.items() if name.partition(".")[0] in there and not _is_in(folder, one)]


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Return whether the module lies in `folder`. Packages of an environment inside the folder are installed ones."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]  # a namespace has no file
    file = next((Path(place) for place in places if isinstance(place, str)), None)
    if file is None or module.__name__.partition("_")[0] == "plait" or not file.is_relative_to(folder):
        return False
    return _INSTALLED.isdisjoint(file.parts)
