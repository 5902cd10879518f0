"""`Trials`: whether a test fails with a mutant in place.

The worker has imported and collected all tests before the first trial. A trial is a fork of the worker: the fork
exchanges the code of the mutated function, which every reference to the function then runs, or a mutated constant in
all modules, and runs the tests until the first failure. Any other change, such as to a field of a class, needs a new
import: a new pytest, to which `served` gives the mutated module, as to every Python that its tests start. So do the
tests that meet the mutant in processes which they start, where no code can be exchanged.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import select
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation import served
from tests.mutation.descendants import Descendants
from tests.mutation.mutants import ROOT, Mutant, mutated_source

_BROKEN = 3
"""The exit status of a fork in which the trial itself failed."""
_MEMORY = 6 << 30
"""Bytes of memory for a trial: a loop that a mutant makes endless ends with a MemoryError."""


class Trials:
    """Runs trials within the collected session of a worker."""

    def __init__(self, session: pytest.Session, seconds: dict[str, float], folder: Path) -> None:
        self._items = {item.nodeid: item for item in session.items}
        self._seconds = seconds
        self._folder = folder
        self._fit: dict[str, bool] = {}
        """Whether a test passes in a fork without a mutant, for each test that ever failed."""
        self._failed = False
        self._descendants = Descendants()
        session.config.pluginmanager.register(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def killer(self, mutant: Mutant, tests: Sequence[str], with_children: Sequence[str]) -> str | None:
        """Return the first of the tests that fails or hangs twice with the mutant and passes without, or None. Those
        `with_children` meet the mutant in processes that they start.
        """
        source = mutated_source(mutant)
        change = _function(mutant, source) if mutant.in_body else _constant(mutant, source)
        in_new_process = partial(self._new_process, mutant, source)
        if change is None:
            return self._first(in_new_process, list(dict.fromkeys([*tests, *with_children])))
        return self._first(partial(self._fork, change), tests) or self._first(in_new_process, with_children)

    def _first(self, trial: Callable[[Sequence[str]], str | None], tests: Sequence[str]) -> str | None:
        tests = [test for test in tests if test in self._items]
        while tests:
            failed = trial(tests)
            if failed is None or failed not in tests or (trial([failed]) is not None and self._is_fit(failed)):
                return failed
            tests = tests[tests.index(failed) + 1 :]
        return None

    def _is_fit(self, test: str) -> bool:
        if test not in self._fit:
            self._fit[test] = self._fork(lambda: None, [test]) is None
        return self._fit[test]

    def _fork(self, change: Callable[[], object], tests: Sequence[str]) -> str | None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            self._run(change, tests, write)
        os.close(write)
        return self._watch(pid, read, 5.0 if len(tests) > 1 else 20.0)

    def _run(self, change: Callable[[], object], tests: Sequence[str], write: int) -> None:
        """Make the change, and run the tests in this fork until one fails, writing the name of each beforehand. Never
        returns.
        """
        status, log = _BROKEN, os.dup(2)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            change()
            for test, following in zip(tests, [*tests[1:], None], strict=True):
                item = self._items[test]
                os.write(write, f"{test}\n".encode())
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following and self._items[following])
                if self._failed:
                    break
            status = int(self._failed)
        except Exception:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(status)

    def _watch(self, pid: int, read: int, patience: float) -> str | None:
        """Return the test of the fork that failed, or took `patience` seconds and eight times its usual; else None."""
        test, until, status = "", time.monotonic() + patience, 1
        with os.fdopen(read, "rb", buffering=0) as pipe:
            while time.monotonic() < until:
                self._descendants.reap(pid)
                if not select.select([pipe], [], [], 0.1)[0]:
                    continue
                lines = pipe.read(65536).decode().splitlines()
                if not lines:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    break
                test = lines[-1]
                until = time.monotonic() + patience + 8 * self._seconds[test]
        self._descendants.kill()
        if status == _BROKEN:
            raise RuntimeError(f"the trial itself failed at {test!r}")
        return test if status else None

    def _new_process(self, mutant: Mutant, source: str, tests: Sequence[str]) -> str | None:
        codes, names = self._folder / "codes", self._folder / "tests.txt"
        shutil.rmtree(codes, ignore_errors=True)
        codes.mkdir()
        served.serve(codes, mutant.module, source)
        names.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "tests.mutation.served", f"@{names}"]
        command.append(f"--basetemp={self._folder / 'tmp'}")
        environment = {**os.environ, "SERVED": str(codes), "MUTANT_HOOK": served.__file__}
        environment["PYTEST_XDIST_WORKER"] = "mutant"  # names a database apart: the mutant may make other tables
        limit = 60 + 8 * sum(self._seconds[test] for test in tests)
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, **_QUIET, check=False)
        except subprocess.TimeoutExpired:
            return "all tests together"
        finally:
            self._descendants.kill()
        if done.returncode == 0:
            return None
        failure = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return failure[1] if failure else "the import"


_VALUES = {str, bytes, int, float, tuple, list, set, frozenset, dict, re.Pattern}
_QUIET: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}


def _imported(mutant: Mutant) -> Any:
    return sys.modules.get(served.dotted(mutant.module))


def _function(mutant: Mutant, source: str) -> Callable[[], object] | None:
    """Return the exchange of the code of the mutant's function, or None if the function is not found as imported."""
    function = _imported(mutant)
    for part in mutant.function.split("."):
        function = vars(function).get(part) if hasattr(function, "__dict__") else None
        function = getattr(function, "fget", None) or function
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or function.__qualname__ != mutant.function:
        return None
    mutated = _code(compile(source, function.__code__.co_filename, "exec", dont_inherit=True), mutant.function)
    if mutated is None or len(mutated.co_freevars) != len(function.__code__.co_freevars):
        return None
    return partial(setattr, function, "__code__", mutated)


def _constant(mutant: Mutant, source: str) -> Callable[[], object] | None:
    """Return the exchange of the mutant's constant in all modules, or None if the mutant changes no constant."""
    module = _imported(mutant)
    name = next(filter(None, map(partial(_assigned, mutant), ast.parse(source).body)), None)
    if module is None or name is None:
        return None
    mutated = {"__name__": module.__name__, "__file__": module.__file__}
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), mutated)
    except Exception:
        return None  # a test in a new process reports that the module cannot be imported
    # Constants that are made from it change with it: those of types that are compared by their value.
    ours = vars(module)
    names = {name} | {key for key, old in ours.items() if type(old) in _VALUES and mutated.get(key, old) != old}
    changed = {key: (ours[key], mutated[key]) for key in names if not key.startswith("__")}

    def exchange() -> None:
        for each in list(sys.modules.values()):
            for key, (old, new) in changed.items():
                if vars(each).get(key) is old:
                    setattr(each, key, new)

    return exchange


def _assigned(mutant: Mutant, statement: ast.stmt) -> str | None:
    """Return the name that the statement assigns, if the mutant is within the statement."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not (
        statement.lineno <= mutant.lines.start <= (statement.end_lineno or 0)
    ):
        return None
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def _code(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}.") and (inner := _code(constant, name)):
                return inner
    return None
