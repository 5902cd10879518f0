"""`plait host` at the end of its standard input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.processes import warm
from tests.support.processes.command import PLAIT, environment, plait


@pytest.mark.parametrize("stdin", [os.devnull, __file__])
def test_an_input_that_is_no_connection_is_refused(tmp_path: Path, stdin: str) -> None:
    done = plait(tmp_path, "host", stdin=Path(stdin))
    assert (done.code, done.out) == (2, "")
    assert "its standard input has to be a pipe or a socket" in done.err


def test_a_connection_that_ends_before_the_first_frame_ends_the_process(tmp_path: Path) -> None:
    given, written = os.pipe()
    os.close(written)
    with os.fdopen(given) as stdin:
        done = warm.run([*PLAIT, "host"], cwd=tmp_path, env=environment(), stdin=stdin, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["op"] == "refused"
