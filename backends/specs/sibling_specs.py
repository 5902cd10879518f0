"""Imports between the Python files of a plan's folder.

While a file named by `call` is loaded, its folder is the first entry of `sys.path`. Afterwards the entry and the
modules of the folder are gone from `sys.path` and `sys.modules`: the next plan may have a module of the same name.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

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
            found = {name: sys.modules[name] for name in set(sys.modules) - before if _is_in(folder, sys.modules[name])}
            _loaded.setdefault(folder, {}).update(found)
            for name in found:
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
