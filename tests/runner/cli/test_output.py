"""Where output goes when nobody reads it any more, or it cannot be written."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.support.plans.logged import CHAIN, make
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

FULL = Path("/dev/full")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, closed: str) -> None:
    make(tmp_path, CHAIN)
    process = Warm(
        [*PLAIT, "run", "plan.yaml"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    gone, kept = (process.stdout, process.stderr) if closed == "stdout" else (process.stderr, process.stdout)
    assert gone is not None
    assert kept is not None
    gone.close()
    with kept:
        said = kept.read()
    assert process.wait(60) == 0
    assert "Traceback" not in said
    assert "Broken" not in said


@pytest.mark.parametrize("more", [[], ["--log", "json", "--log-level", "debug"]])
def test_a_run_goes_on_where_its_progress_cannot_be_written(tmp_path: Path, more: list[str]) -> None:
    make(tmp_path, CHAIN)
    with FULL.open("w") as full:
        process = Warm([*PLAIT, "run", "plan.yaml", *more], cwd=tmp_path, env=environment(), stdout=PIPE, stderr=full)
        assert process.communicate(timeout=60) == ("re: two re: one\n", None)
        assert process.wait() == 0


@pytest.mark.parametrize("more", [[], ["--json"], ["-q"]])
def test_a_result_that_cannot_be_written_is_said_and_stays_stored(tmp_path: Path, more: list[str]) -> None:
    make(tmp_path, CHAIN)
    with FULL.open("w") as full:
        process = Warm([*PLAIT, "run", "plan.yaml", *more], cwd=tmp_path, env=environment(), stdout=full, stderr=PIPE)
        _, said = process.communicate(timeout=60)
    assert process.wait() == 3
    last = "plait: standard output cannot be written: No space left on device; send it to another place"
    assert said.splitlines()[-1] == last
    assert "Traceback" not in said
    assert ("plait show" in said) is ("-q" not in more)
    assert plait(tmp_path, "show", "last", "--json").value["status"] == "completed"


def test_streams_that_were_closed_before_are_no_error(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    words = " ".join([*PLAIT, "run", "plan.yaml", "--json"])
    done = subprocess.run(
        ["sh", "-c", f"{words} >&- 2>&-"], cwd=tmp_path, env=environment(), capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("words", [["version"], ["runs"], ["run", "../plan.yaml"], ["resume", "last"], ["doctor"]])
def test_a_removed_working_directory_is_one_line(words: list[str], tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    (tmp_path / "gone").mkdir()
    script = f"rmdir ../gone && exec {shlex.join([*map(str, PLAIT), *words])}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path / "gone", env=environment(), capture_output=True, text=True, check=False
    )
    line = "plait: the working directory has been removed; change to a folder that exists, as with `cd`\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_a_run_survives_the_removal_of_its_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    (tmp_path / "work.py").write_text(
        f"import os\n\nasync def work(prompt):\n    os.rmdir({str(folder)!r})\n    return prompt\n"
    )
    (tmp_path / "plan.yaml").write_text(
        "name: gone\nbackends:\n  w: {kind: function, call: 'work.py:work'}\ntasks: [{id: a, backend: w, prompt: hi}]\n"
    )
    done = plait(folder, "run", "../plan.yaml", "--store", str(tmp_path / "store.db"))
    assert (done.code, "Traceback" in done.err) == (0, False)


FENCED = """
from contextlib import asynccontextmanager
from plait.backends import Reply

class Talk:
    session_id = None
    async def send(self, prompt):
        if prompt == "null":
            return Reply("```json\\nnull\\n```")
        return Reply('Here it is:\\n```json\\n{"label": "grün", "n": [1, 2]}\\n```', {"label": "grün", "n": [1, 2]})

class Backend:
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        yield Talk()

fenced = Backend()

def plain(prompt):
    return "```text\\n" + prompt + "\\n```"
"""
FENCED_PLAN = """
backends:
  fenced: {kind: function, call: "fenced.py:fenced"}
  plain: {kind: function, call: "fenced.py:plain"}
tasks:
  - {id: one, backend: fenced, prompt: one, output_schema: {type: object}}
"""


def test_a_structured_result_is_printed_as_json_and_a_text_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "fenced.py").write_text(FENCED)
    (tmp_path / "plan.yaml").write_text(FENCED_PLAN)
    expected = '{"label":"grün","n":[1,2]}\n'
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").out == expected
    assert plait_here(tmp_path, "resume", "last", "-q").out == expected
    assert plait_here(tmp_path, "fork", "last", "--from", "one", "--again", "-q").out == expected
    assert plait_here(tmp_path, "try", "last", "one", "--again", "-q").out == expected
    (tmp_path / "plan.yaml").write_text(
        FENCED_PLAN
        + "  - {id: two, backend: plain, prompt: two}\n"
        + '  - {id: three, backend: fenced, prompt: "null", output_schema: {type: "null"}}\n'
    )
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert done.out == f"== one ==\n{expected}== two ==\n```text\ntwo\n```\n== three ==\nnull\n"
