"""Lines out of a file that grows: all of them, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.process.child_process import Lines
from tests.support.processes.room import ROOT
from tests.support.sizes import size

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("many_lines", {"lines": 2**17, "total": 2**27 - 2**17, "skipped": 0}),
        *size([], [("gigabyte", {"lines": 2**20, "total": 2**30 - 2**20, "skipped": 0})]),
        ("long_line", {"lines": 3, "total": 16, "skipped": 1}),
    ],
)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs procfs")
def test_memory_stays_bounded(name: str, figures: dict[str, int], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.support.processes.room_reader", name, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "t" / "stdout").unlink()
    found = json.loads(done.stdout)
    assert found.pop("grown") < 50 * 2**20
    assert found == figures


@given(st.lists(st.binary(max_size=9), max_size=20), st.integers(1, 7))
def test_lines_are_the_same_in_whatever_pieces_they_come(parts: list[bytes], size: int) -> None:
    text = b"\n".join(parts)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found: list[bytes] = []
    lines = Lines(lambda _: pieces.pop(0) if pieces else b"", lambda line: bool(found.append(line)))
    while lines.pump():
        pass
    lines.flush()
    assert found == (text[:-1] if text.endswith(b"\n") else text).split(b"\n")[: len(text)]
    assert lines.total == len(text)
