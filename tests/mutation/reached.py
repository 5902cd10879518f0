"""`Reached`: which test reaches which line, gathered once and kept in `.mutants/reached.json`.

A file of tests is run again when it changed. The lines of a module that changed later are found by comparing its text
with the text at that time; a new line counts as reached by the tests of the nearest line before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutation.mutants import FOLDER, MODULES, ROOT, Mutant

FOLDERS = ("tests/runner", "tests/persistence", "tests/backends", "tests/faults", "tests/test_")
"""The tests that run a mutant, but the slow ones. The others read the source, the pages, or need a network."""
_FILE = FOLDER / "reached.json"


class Reached:
    """The tests with their lines and seconds."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Use the tests in the folders, or of the files, of these names only."""
        self._folders = folders
        self._files: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
        self._tests = dict(self._all())
        self._lines: dict[str, dict[int, set[str]]] = {}

    def update(self, jobs: int) -> None:
        """Run the files of tests that changed, and record what they reach."""
        names = _test_files(self._folders)
        hashes = {name: _hash(name) for name in (*MODULES, *names)}
        stale = [name for name in names if self._files.get(name, {}).get("hashes", {}).get(name) != hashes[name]]
        if not stale:
            return
        print(f"gathering what the tests in {len(stale)} files reach ...", flush=True)
        for module in MODULES:
            (FOLDER / hashes[module]).write_text((ROOT / module).read_text())
        reached = _gathered(stale, jobs)
        for name in stale:
            tests = {test: value for test, value in reached.items() if test.startswith(f"{name}::")}
            used = {name, *(module for value in tests.values() for module in value["lines"])}
            self._files[name] = {"hashes": {each: hashes[each] for each in sorted(used)}, "tests": tests}
        self._files = {name: self._files[name] for name in sorted(self._files) if (ROOT / name).exists()}
        _FILE.write_text(json.dumps(self._files))
        self._tests = dict(self._all())

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each test: all, and those of a processor."""
        return {test: (value["seconds"], value["processor"]) for test, value in self._tests.items()}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the mutant in their own process, in the order to run."""
        by_line = self._by_line(mutant.module)
        lines = list(mutant.lines) if mutant.in_body else list(by_line)
        if not any(line in by_line for line in lines):  # a constant: compiled on the first line of its statement
            lines = [max((line for line in by_line if line < mutant.lines.start), default=0)]
        return self._in_order(mutant, {test for line in lines for test in by_line.get(line, ())})

    def tests_with_children(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the mutant's function in processes that they start, in the order to run; outside
        functions, those that reach its module.
        """
        reaching = set[str]()
        for test, value in self._tests.items():
            functions = value["children"].get(mutant.module, ())
            if mutant.function in functions or (functions and not mutant.in_body):
                reaching.add(test)
        return self._in_order(mutant, reaching)

    def _in_order(self, mutant: Mutant, reaching: set[str]) -> list[str]:
        """Return the tests: first those of the mutant's module, then those of its package, the fastest first; but one
        case of each function before the second ones.
        """
        module, cases = Path(mutant.module.removeprefix("src/plait/")), Counter[str]()
        area = "/".join(module.parts[: 2 if mutant.module.startswith("runner/") else 1])
        own = (Path("tests") / module.parent / f"test_{module.stem}.py").as_posix() + "::"

        def rank(test: str) -> tuple[bool, bool, int]:
            cases[function := test.partition("[")[0]] += 1
            return not test.startswith(own), not test.startswith(f"tests/{area}/"), cases[function]

        return sorted(sorted(reaching, key=lambda test: (self._tests[test]["processor"], test)), key=rank)

    def _by_line(self, module: str) -> dict[int, set[str]]:
        """Return the tests that reach each line of the module's text."""
        if module not in self._lines:
            reached = self._lines[module] = defaultdict[int, set[str]](set)
            for value in self._used():
                now = _moved(module, value["hashes"][module]) if module in value["hashes"] else {}
                for test, its in value["tests"].items():
                    for line in its["lines"].get(module, ()):
                        if line in now:
                            reached[now[line]].add(test)
        return self._lines[module]

    def state(self, tests: list[str]) -> str:
        """Return a hash of the tests and their files."""
        files = {test.partition("::")[0] for test in tests}
        texts = [*sorted(tests), *(self._files[name]["hashes"][name] for name in sorted(files))]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    def _all(self) -> Iterator[tuple[str, Any]]:
        for value in self._used():
            yield from value["tests"].items()

    def _used(self) -> list[Any]:
        return [value for name, value in self._files.items() if name.startswith(tuple(self._folders))]


@cache
def _moved(module: str, text: str) -> dict[int, int]:
    """Return the line of the module's text for each line of the earlier text that is still there."""
    before, now = (FOLDER / text).read_text().splitlines(), (ROOT / module).read_text().splitlines()
    blocks = SequenceMatcher(None, before, now, autojunk=False).get_matching_blocks()
    return {old + line: new + line for old, new, size in blocks for line in range(1, size + 1)}


def _gathered(files: list[str], jobs: int) -> dict[str, Any]:
    for old in FOLDER.glob("reached.*.*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    modules = FOLDER / "reached.txt"
    modules.write_text("\n".join(MODULES))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.mutation.gather",
        "-n",
        str(jobs),
        "--dist",
        "loadfile",
        "-m",
        "not slow",
    ]
    subprocess.run([*command, *files], cwd=ROOT, env={**os.environ, "PLAIT_REACHED": str(modules)}, check=False)
    reached: dict[str, Any] = {}
    for path in FOLDER.glob("reached.*.json"):
        reached |= json.loads(path.read_text())
    return reached


def _test_files(folders: Sequence[str]) -> list[str]:
    every = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(name for name in every if name.startswith(tuple(folders)))


def _hash(name: str) -> str:
    path = ROOT / name
    texts = [path.read_bytes()]
    if path.name == "test_contract.py":  # its tests are written once for all that keep the contract
        texts += [each.read_bytes() for each in sorted((ROOT / "tests" / "contracts").rglob("*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]
