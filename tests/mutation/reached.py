"""`Reached`: which test reaches which line, gathered once and kept in `.mutants/reached.json`.

A file of tests is run again when it changed, or when a module that its tests reached changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mutation.mutants import MODULES, ROOT, Mutant

FOLDER = ROOT / ".mutants"
FOLDERS = ("tests/runner", "tests/persistence", "tests/backends", "tests/faults")
"""The tests that run a mutant. The others read the source, the pages, or need a network."""
_FILE = FOLDER / "reached.json"


class Reached:
    """The tests with their lines and seconds."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
        self._tests = dict(self._all())

    def update(self, jobs: int) -> None:
        """Run the files of tests that changed, and record what they reach."""
        hashes = {name: _hash(name) for name in (*MODULES, *_test_files())}
        stale = [
            name
            for name in _test_files()
            if self._files.get(name, {}).get("hashes", {}).get(name) != hashes[name]
            or any(hashes.get(each) != value for each, value in self._files[name]["hashes"].items())
        ]
        if not stale:
            return
        print(f"gathering what the tests in {len(stale)} files reach ...", flush=True)
        found = _gathered(stale, jobs)
        for name in stale:
            tests = {test: value for test, value in found.items() if test.startswith(f"{name}::")}
            used = {name, *(module for value in tests.values() for module in value["lines"])}
            self._files[name] = {"hashes": {each: hashes[each] for each in sorted(used)}, "tests": tests}
        self._files = {name: self._files[name] for name in _test_files()}
        _FILE.write_text(json.dumps(self._files))
        self._tests = dict(self._all())

    def seconds(self) -> dict[str, float]:
        return {test: value["seconds"] for test, value in self._tests.items()}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that reach the mutant: first those of its package, the fastest first."""
        area = "/".join(Path(mutant.module).parts[: 2 if mutant.module.startswith("runner/") else 1])
        lines = set(mutant.lines) if mutant.in_body else None
        reaching = [test for test, value in self._tests.items() if _reaches(value["lines"].get(mutant.module), lines)]
        if not reaching and lines:  # the compiler puts a constant on the first line of its statement
            before = self._line_before(mutant)
            reaching = [test for test, value in self._tests.items() if before in value["lines"].get(mutant.module, ())]
        return sorted(reaching, key=lambda test: (not test.startswith(f"tests/{area}/"), self._tests[test]["seconds"]))

    def state(self, tests: list[str]) -> str:
        """Return a hash of the tests and their files."""
        files = {test.partition("::")[0] for test in tests}
        texts = [*sorted(tests), *(self._files[name]["hashes"][name] for name in sorted(files))]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    def _line_before(self, mutant: Mutant) -> int:
        found = {line for value in self._tests.values() for line in value["lines"].get(mutant.module, ())}
        return max((line for line in found if line < mutant.lines.start), default=0)

    def _all(self) -> Iterator[tuple[str, Any]]:
        for value in self._files.values():
            yield from value["tests"].items()


def _reaches(reached: list[int] | None, lines: set[int] | None) -> bool:
    return reached is not None and (lines is None or not lines.isdisjoint(reached))


def _gathered(files: list[str], jobs: int) -> dict[str, Any]:
    for old in FOLDER.glob("reached.*.json"):
        old.unlink()
    asked = FOLDER / "reached.txt"
    asked.write_text("\n".join(MODULES))
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.gather", "-n", str(jobs), "--dist", "loadfile"]
    subprocess.run([*command, *files], cwd=ROOT, env={**os.environ, "PLAIT_REACHED": str(asked)}, check=False)
    found: dict[str, Any] = {}
    for path in FOLDER.glob("reached.*.json"):
        found |= json.loads(path.read_text())
    return found


def _test_files() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")
    )


def _hash(name: str) -> str:
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16]
