"""A plugin of pytest, and a hook of interpreters, that imports modules from code in the folder named by `SERVED`.

The code is a mutant's, or that of `marked`, which records, in files whose names begin as `REACHED` says, what tests
reach in the processes that they start.
"""

from __future__ import annotations

import ast
import builtins
import marshal
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]
_MARK = "__reached__"


def dotted(module: str) -> str:
    """Return the name by which the module is imported."""
    return "plait." + module.removeprefix("src/plait/").removesuffix(".py").replace("/", ".")


def serve(folder: Path, module: str, source: str | ast.Module) -> None:
    """Let interpreters with the hook import the module from this source."""
    code = compile(source, str(_path(module)), "exec", dont_inherit=True)
    (folder / f"{dotted(module)}.code").write_bytes(marshal.dumps(code))


def marked(module: str, source: str) -> ast.Module:
    """Return the module with a call at the beginning of each function and method that records it as reached."""
    tree = ast.parse(source)
    _mark(module, "", tree.body)
    return tree


def _mark(module: str, holder: str, body: list[ast.stmt]) -> None:
    for each in body:
        if isinstance(each, ast.ClassDef):
            _mark(module, f"{holder}{each.name}.", each.body)
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            call = ast.parse(f"{_MARK}({module!r}, {holder + each.name!r})").body[0]
            for node in ast.walk(call):
                ast.copy_location(node, each.body[0])
            each.body.insert(0 if ast.get_docstring(each, clean=False) is None else 1, call)


def _path(module: str) -> Path:
    return ROOT / "src" / "plait" / module.removeprefix("src/plait/")


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: Path) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = marshal.loads(self._code.read_bytes())
        return code


class _Finder:
    def __init__(self, folder: Path) -> None:
        self._codes = {file.stem: file for file in folder.glob("*.code")}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if (code := self._codes.get(name)) is None:
            return None
        place = str(_path(name.removeprefix("plait.").replace(".", "/") + ".py"))
        return spec_from_file_location(name, place, loader=_Loader(name, place, code))


_written: set[tuple[str, str, str]] = set()


def _record(module: str, function: str) -> None:
    """Append at once what is reached: many of these processes are killed."""
    line = os.environ.get("PYTEST_CURRENT_TEST", ""), module, function
    if line not in _written and "REACHED" in os.environ:
        _written.add(line)
        # A process may have been forbidden to write: it is to fail where the test wants that, and not here.
        with suppress(OSError), Path(f"{os.environ['REACHED']}.{os.getpid()}").open("a") as file:
            file.write("\t".join(line) + "\n")


if "SERVED" in os.environ:
    setattr(builtins, _MARK, _record)
    sys.meta_path.insert(0, _Finder(Path(os.environ["SERVED"])))
