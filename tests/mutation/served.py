"""A plugin of pytest, and a hook of interpreters, to import one module from the text in the file named by `MUTANT`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).resolve().parents[2]


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, module: str, source: str) -> None:
        path = module.removeprefix("src/plait/")
        self._name = "plait." + path.removesuffix(".py").replace("/", ".")
        self._path = str(ROOT / "src" / "plait" / path)
        self._source = source

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return spec_from_file_location(name, self._path, loader=_Loader(name, self._path, self._source))


if "MUTANT" in os.environ:
    mutant = json.loads(Path(os.environ["MUTANT"]).read_text())
    sys.meta_path.insert(0, _Finder(mutant["module"], mutant["source"]))  # type: ignore[arg-type]
