"""Stores that fail under the command: what is paid, what is said, the exit code, and the commands that are offered."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from plait.persistence import sqlite_file
from plait.runner.engine import checkpointer
from tests.support.processes.command import PLAIT, environment, plait, plait_here

PLAN = """
backends: {f: {kind: function, call: "work.py:work"}}
tasks:
  - {id: a, prompt: one}
  - {id: b, prompt: "two {{ a }}", depends_on: a}
"""
WORK = """
import resource
from pathlib import Path

async def work(prompt):
    Path(f"call {len(list(Path().glob('call *')))} {prompt[:10]}").touch()
    %s
    return "done"
"""
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (1, -1))"
"""No file grows any more, as on a full disk."""
REFUSING = """
CREATE TRIGGER refusing BEFORE INSERT ON attempts BEGIN SELECT RAISE(ABORT, 'no result is good enough'); END
"""


def make(folder: Path, fault: str = "", plan: str = PLAN) -> None:
    (folder / "plan.yaml").write_text(plan)
    (folder / "work.py").write_text(WORK % (fault or "pass"))


def calls(folder: Path) -> list[str]:
    """The prompts of all calls, in their order."""
    return [path.name.split(maxsplit=2)[2] for path in sorted(folder.glob("call *"))]


def forget_calls(folder: Path) -> None:
    for path in folder.glob("call *"):
        path.unlink()


@pytest.mark.parametrize("words", [("-q",), (), ("--json",)])
def test_what_a_full_disk_did_not_take_is_told_and_resumed(tmp_path: Path, words: tuple[str, ...]) -> None:
    make(tmp_path, FULL)
    done = plait(tmp_path, "run", "plan.yaml", *words)
    assert done.code == 3
    if words == ("-q",):
        said = r"plait: run (\S+) is interrupted: \d+ changes not stored: .+; next: plait resume \1\n"
        assert re.fullmatch(said, done.err)
        assert done.out == "done\n", "what was paid for is printed"
    elif words == ("--json",):
        assert (done.value["status"], done.value["degraded"][0]["lost"] > 0) == ("interrupted", True)
    else:
        assert re.search(r"^\S+ run \S+ interrupted$", done.err, re.MULTILINE), "and not that it is completed"
        assert not re.search(r"^\S+ run \S+ completed$", done.err, re.MULTILINE)
        assert re.search(r"^  store +it failed .* changes not stored: ", done.err, re.MULTILINE)
        assert re.search(r"^  resume +plait resume \S+$", done.err, re.MULTILINE)
    make(tmp_path)
    [run] = plait_here(tmp_path, "runs", "--json").value
    assert run["status"] == "interrupted"
    again = plait_here(tmp_path, "resume", "last", "-q")
    assert (again.code, again.out) == (0, "done\n")
    assert calls(tmp_path) == ["one", "two done", "one", "two done"]


HOLDER = """
import sqlite3, sys, time
from pathlib import Path
while not list(Path().glob("call *")):
    time.sleep(0.01)
connection = sqlite3.connect(".plait/plait.db", timeout=30, isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
Path("held").touch()
sys.stdin.read()
"""
"""Locks the store from the first call of a run on."""
UNTIL_HELD = """
    import asyncio
    while not Path("held").exists():
        await asyncio.sleep(0.01)
"""


@pytest.mark.parametrize("words", [("-q",), ()])
def test_a_file_that_another_process_locks_to_the_end_of_a_run_ends_it_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(checkpointer, "BUSY_PATIENCE_S", 0.5)
    make(tmp_path, UNTIL_HELD)
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=tmp_path, stdin=subprocess.PIPE):
        done = plait_here(tmp_path, "run", "plan.yaml", *words)
    reason = "changes not stored: .*database is locked; another process has been writing"
    assert (done.code, done.out) == (3, "done\n"), "what was paid for is printed"
    if words:
        assert re.fullmatch(rf"plait: run (\S+) is interrupted: \d+ {reason}.*; next: plait resume \1\n", done.err)
    else:
        assert re.search(rf"^  store +it failed .*{reason}", done.err, re.MULTILINE)
    [run] = plait_here(tmp_path, "runs", "--json").value
    assert run["status"] == "interrupted"
    assert plait_here(tmp_path, "resume", "last", "-q").code == 0


def test_a_database_that_may_only_be_read_begins_no_run(tmp_path: Path) -> None:
    make(tmp_path)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    forget_calls(tmp_path)
    with (tmp_path / ".plait" / "plait.db").open("r+b") as file:
        file.seek(18)
        file.write(b"\x03")  # a version of the format that SQLite only reads, also for root
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert (done.code, calls(tmp_path), done.out) == (3, [], "")
    assert re.fullmatch(r"plait: .*attempt to write a readonly database; check the permissions .*\n", done.err)


def test_a_run_that_cannot_be_stored_does_not_begin(tmp_path: Path) -> None:
    make(tmp_path, plan=PLAN.replace("one", "x" * 400_000))
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0  # makes the store
    forget_calls(tmp_path)
    make(tmp_path, plan=PLAN.replace("one", "y" * 400_000))
    words = ["bash", "-c", f"trap '' XFSZ; ulimit -f 128; exec {' '.join(PLAIT)} run plan.yaml"]  # KiB of each file
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, calls(tmp_path), done.stdout) == (3, [], "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("plait: "), done.stderr
    assert len(plait_here(tmp_path, "runs", "--json").value) == 1


def test_a_file_that_is_emptied_during_the_last_task_ends_the_run_with_3(tmp_path: Path) -> None:
    make(tmp_path, 'import os; prompt == "one" or os.truncate(".plait/plait.db", 0)')
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert (done.code, done.out) == (3, "done\n")
    assert "changes not stored: " in done.err and "was removed or replaced, or emptied, while in use" in done.err


def test_a_result_that_the_store_refuses_is_a_failed_task(tmp_path: Path) -> None:
    make(tmp_path)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        database.execute(REFUSING.replace("ON attempts", "ON attempts WHEN NEW.text IS NOT NULL"))
    done = plait_here(tmp_path, "run", "plan.yaml")
    assert (done.code, calls(tmp_path)) == (1, ["one", "two done", "one"])
    assert re.search(r"^  failed +a: not_stored: .*no result is good enough", done.err, re.MULTILINE)
    newest = plait_here(tmp_path, "runs", "--json").value[0]
    assert newest["status"] == "failed"


def test_a_store_that_takes_no_end_of_any_attempt_leaves_the_run_to_be_resumed(tmp_path: Path) -> None:
    make(tmp_path)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        database.execute(REFUSING)
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert done.code == 3
    assert "1 change not stored" in done.err and "no result is good enough" in done.err
    assert plait_here(tmp_path, "runs", "--json").value[0]["status"] == "interrupted"
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        database.execute("DROP TRIGGER refusing")
    assert plait_here(tmp_path, "resume", "-q").code == 0


@pytest.mark.parametrize("command", ["run", "resume"])
def test_strict_ends_the_run_once_the_store_fails(tmp_path: Path, command: str) -> None:
    make(tmp_path, "raise OSError('no')" if command == "resume" else FULL)
    words = ["run", "plan.yaml"]
    if command == "resume":
        assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
        forget_calls(tmp_path)
        make(tmp_path, FULL)
        words = ["resume", "last", "--retry-failed"]
    done = plait(tmp_path, *words, "-q", "--strict")
    assert (done.code, calls(tmp_path), done.out) == (3, ["one"], "")
    assert len(done.err.splitlines()) == 1 and done.err.startswith("plait: ")


def test_strict_without_a_store_is_a_mistake(tmp_path: Path) -> None:
    make(tmp_path)
    done = plait_here(tmp_path, "run", "plan.yaml", "--strict", "--no-store")
    assert (done.code, calls(tmp_path)) == (2, [])
    assert "leave one of them out" in done.err
