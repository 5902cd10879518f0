"""The memory of `plait show` for a run with a large result: of a real process, at its peak."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plait.events import TaskCompleted, TaskStarted
from plait.persistence import SQLiteStore
from plait.usage import Usage
from tests.contracts.store.samples import ANSWER, ASK, DONE_A, OPENING, RUN, START_A, Writer, at, reworded
from tests.support.processes.command import environment

pytestmark = pytest.mark.slow

SIZE_MIB = 36
"""More than 32 MiB: glibc returns the memory of such a text to the system at once."""
OUTPUT_MIB = 4
"""What a process may take for other things than a large text, at most: reading, hashing and printing in pieces."""
JSON_MIB = 16
"""The same for JSON, with the pieces that are written at once."""
PEAK = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "plait", *sys.argv[1:]], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(child.pid, 0)
print(status, used.ru_maxrss)
"""
"""In between, because a child counts the memory of the process that started it."""


def peak_mib(store: Path, *words: str) -> float:
    """The most memory of `plait show WORDS` at a time."""
    line = [sys.executable, "-c", PEAK, "show", "--store", str(store), *words]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    status, kilobytes = done.stdout.split()
    assert (status, done.stderr) == ("0", "")
    return int(kilobytes) / 1024


async def store_run(path: Path, text: str) -> None:
    """A run whose task `a` has the result `text`, in the conversation and with data, and `b` a small one."""
    small = TaskStarted(at(5), "b", 1, "fast", None), TaskCompleted(at(6), "b", 1, "small", None, Usage(), 1.0)
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING, START_A, ASK)
        await writer.write(reworded(ANSWER, text), replace(DONE_A, text=text))
        await writer.write(*small)


@pytest.fixture
async def stores(tmp_path: Path) -> tuple[Path, Path]:
    """A store whose run has a large result, and one whose run has a small one."""
    large, small = tmp_path / "large.db", tmp_path / "small.db"
    await store_run(large, ("x" * 1023 + "\n") * 1024 * SIZE_MIB)
    await store_run(small, "short")
    return large, small


async def test_a_large_result_costs_others_nothing_and_itself_twice_its_size(stores: tuple[Path, Path]) -> None:
    large, small = stores
    usual = peak_mib(small, RUN, "a")
    assert peak_mib(large, RUN, "b") < usual + OUTPUT_MIB
    for words in ([RUN, "a"], [RUN]):
        assert peak_mib(large, *words) < usual + 2 * SIZE_MIB + OUTPUT_MIB, words
    usual = peak_mib(small, RUN, "a", "--json")  # with pydantic, which writes JSON
    for words in ([RUN, "a", "--json"], [RUN, "--json"]):
        assert peak_mib(large, *words) < usual + 2 * SIZE_MIB + JSON_MIB, words
