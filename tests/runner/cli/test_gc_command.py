"""`plait gc` and `plait runs --long`: what a store holds, and how old runs leave it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from plait.events import Owner
from plait.persistence import sqlite_file
from plait.persistence.store_records import RunRecord
from plait.runner.client.runs import expired
from tests.support.plans.logged import make, wait_for_call
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm
from tests.support.stores.database import edit_runs

STORE = Path(".plait") / "plait.db"
TASKS = "  - {id: a, prompt: one}\n  - {id: b, prompt: two, backend: fail}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A completed run, a failed one, and a completed one, oldest first."""
    make(tmp_path, TASKS, fail="fail", hold="hold")
    one = make(tmp_path / "one", "  - {id: a, prompt: alone}\n")
    for plan, code in ((one, 0), ("plan.yaml", 1), (one, 0)):
        assert plait_here(tmp_path, "run", str(plan), "-q").code == code
    return tmp_path


@contextmanager
def under_way(folder: Path) -> Generator[Warm]:
    """A run of the plan in `folder` that holds at its last call; killed at the end."""
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as running:
        try:
            wait_for_call(folder, "wait")
            yield running
        finally:
            running.kill()


def runs(folder: Path) -> list[str]:
    return [run["run_id"] for run in plait_here(folder, "runs", "--json").value]


def left_behind(folder: Path, run_id: str) -> list[str]:
    """The tables that still hold something of the run."""
    with closing(sqlite3.connect(f"{(folder / STORE).as_uri()}?mode=ro", uri=True)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        columns = {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}
        held = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in names}
    return [name for name in names if "run_id" in columns[name] and any(run_id in row for row in held[name])]


def test_all_but_the_newest_ended_runs_go(folder: Path) -> None:
    newest, failed, oldest = runs(folder)
    done = plait(folder, "gc", "--keep", "1")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [failed, oldest]
    assert lines[-1].startswith("deleted 2 runs, ")
    assert lines[-1].endswith(" freed; 1 kept")
    assert runs(folder) == [newest]
    assert left_behind(folder, failed) == left_behind(folder, oldest) == []
    assert left_behind(folder, newest) != []
    assert plait_here(folder, "gc", "--keep", "1").out == "deleted 0 runs, 0 B freed; 1 kept\n"
    assert plait_here(folder, "doctor").code == 0


def test_a_dry_run_says_the_same_and_deletes_nothing(folder: Path) -> None:
    before = runs(folder)
    would = plait_here(folder, "gc", "--keep", "2", "--dry-run", "--json").value
    assert (would["dry_run"], would["kept"], would["freed_bytes"]) == (True, 2, 0)
    assert runs(folder) == before
    did = plait_here(folder, "gc", "--keep", "2", "--json").value
    assert did["runs"] == would["runs"]
    assert [run["run_id"] for run in did["runs"]] == before[2:]
    assert did["runs"][0]["size_bytes"] > 0


def test_a_large_run_gives_its_space_back_and_its_text_is_gone(folder: Path) -> None:
    make(folder, f"  - {{id: a, prompt: {'secret-' * 30_000}}}\n")
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    big = runs(folder)[0]
    sizes = {run["run_id"]: run["size_bytes"] for run in plait_here(folder, "runs", "--long", "--json").value}
    assert sizes[big] > 200_000
    done = plait_here(folder, "gc", "--keep", "0", "--json").value
    assert done["freed_bytes"] > 200_000
    assert not any(b"secret-secret" in file.read_bytes() for file in (folder / ".plait").iterdir())
    assert {file.stat().st_mode & 0o777 for file in (folder / ".plait").iterdir()} == {0o600}


def test_age_counts_from_the_end(folder: Path) -> None:
    oldest = runs(folder)[-1]
    assert plait_here(folder, "gc", "--older-than", "1h", "--json").value["runs"] == []
    edit_runs(folder / STORE, f"ended_at = iif(run_id = '{oldest}', '2001-01-01T00:00:00.000Z', ended_at)")
    assert plait_here(folder, "gc", "--older-than", "30d", "--keep", "3", "--json").value["runs"] == []
    done = plait_here(folder, "gc", "--older-than", "30d", "--keep", "1", "--json").value
    assert [run["run_id"] for run in done["runs"]] == [oldest]


def test_what_can_be_resumed_or_is_under_way_stays(folder: Path) -> None:
    make(folder, "  - {id: w, prompt: wait, backend: hold}\n", hold="hold")
    with under_way(folder):
        unfinished = runs(folder)[0]
        assert plait_here(folder, "gc", "--keep", "0").code == 0
        assert runs(folder) == [unfinished]
    assert plait_here(folder, "gc", "--keep", "0", "--older-than", "0m").code == 0
    assert runs(folder) == [unfinished]
    (folder / "go").touch()
    assert plait_here(folder, "resume", "last", "-q").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--keep N, --older-than AGE, or both"),
        (["--older-than", "soon"], "'soon' is not an age such as 30d, 12h or 45m"),
        (["--older-than", "-1d"], "not an age"),
        (["--keep", "-1"], "-1"),
        (["--keep", "1", "--store", "nope.db"], "does not exist"),
    ],
)
def test_what_is_not_understood_is_said(tmp_path: Path, words: list[str], said: str) -> None:
    done = plait_here(tmp_path, "gc", *words)
    assert (done.code, done.out) == (3 if "nope.db" in words else 2, "")
    assert said in done.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_ended_run_that_somebody_goes_on_with_stays() -> None:
    at = "2026-01-01T00:00:00.000Z"
    free = RunRecord("r", "", "completed", at, at, at, None, "{}", (), 9, None, None, {"completed": 1})
    owned = replace(free, owner=Owner("o", "elsewhere", "boot", 1, "1", at), lease_expires_at=2e9)
    assert expired([free, owned, free], 2e9, keep=0) == [free, free]
    assert expired([free], 2e9) == []
    unfinished = [replace(free, status=status) for status in ("queued", "running", "waiting_input", "cancelling")]
    assert expired([*unfinished, owned, free], 2e9, keep=1) == [free]


def test_a_dry_run_counts_what_a_dead_process_owns_as_the_deletion_does(folder: Path) -> None:
    host, boot = os.uname().nodename, Path("/proc/sys/kernel/random/boot_id")
    of_before = "another" if boot.exists() else ""
    owner = "claims = json_array(json_array(json_extract(claims, '$[0][0]'), 'o')), "
    owner += f"owner_id = 'o', owner_host = '{host}', owner_boot_id = '{of_before}', owner_pid = 4190000"
    claimed = "owner_process_started = '1', owner_claimed_at = created_at, claims = json_set(claims, '$[#-1][1]', 'o')"
    edit_runs(folder / STORE, f"{owner}, {claimed}")
    would = plait_here(folder, "gc", "--keep", "1", "--dry-run", "--json").value
    assert len(would["runs"]) == 2
    assert plait_here(folder, "gc", "--keep", "1", "--json").value["runs"] == would["runs"]


def test_while_somebody_reads_it_says_that_something_remains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.1)
    with closing(sqlite3.connect(folder / STORE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        done = plait_here(folder, "gc", "--keep", "1", "--json")
        assert (done.code, done.value["remains"] is None, len(done.err.splitlines())) == (0, False, 1)
        assert len(done.value["runs"]) == 2
    done = plait_here(folder, "gc", "--keep", "1", "--json")
    assert (done.err, done.value["remains"], done.value["runs"]) == ("", None, [])
    assert done.value["freed_bytes"] >= 0


def test_runs_at_length(folder: Path) -> None:
    value = plait_here(folder, "runs", "--long", "--json").value
    assert all(run["size_bytes"] > 0 and run["owner"] is None for run in value)
    lines = plait_here(folder, "runs", "--long").out.splitlines()
    assert lines[0].split() == ["RUN", "NAME", "STATUS", "TASKS", "COST", "TOKENS", "SIZE", "AGE", "OWNER"]
    assert len(lines) == 4
    make(folder, "  - {id: w, prompt: wait, backend: hold}\n", hold="hold")
    with under_way(folder) as running:
        assert plait_here(folder, "runs", "--long", "--json").value[0]["owner"]["liveness"] == "alive"
        assert f"process {running.pid} on {os.uname().nodename}" in plait_here(folder, "runs", "--long").out
    assert f"process {running.pid} on {os.uname().nodename}, gone" in plait_here(folder, "runs", "--long").out


def test_the_long_list_of_an_empty_store(folder: Path) -> None:
    assert plait_here(folder, "gc", "--keep", "0").code == 0
    assert plait_here(folder, "runs", "--long").out == "no runs yet; `plait run PLAN` makes one\n"


def test_a_run_that_an_unfinished_run_takes_answers_from_stays(folder: Path) -> None:
    oldest = runs(folder)[-1]
    make(folder, f"{TASKS}  - {{id: c, prompt: wait, backend: hold}}\n", fail="fail", hold="hold")
    with Warm([*PLAIT, "run", "plan.yaml", "--like", oldest, "-q"], cwd=folder, env=environment()) as running:
        wait_for_call(folder, "wait")
        running.kill()
    plait_here(folder, "gc", "--keep", "0")
    assert runs(folder)[1:] == [oldest]
