"""`--park` and `plait wake`: a run ends until a time, and goes on then; what is printed, and the timer to copy."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest

from plait.clock_and_ids import Clock
from plait.runner.cli import serve_commands
from tests.support.processes import fleet
from tests.support.processes.browser import ui
from tests.support.processes.command import Done, environment, plait, plait_here
from tests.support.processes.warm import Warm
from tests.support.receiver import receiving

PLAN = """
name: limited
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: a, prompt: "a"}
  - {id: b, prompt: "b {{ a }}", depends_on: [a]}
"""
WORK = """
from pathlib import Path
from plait.errors import BackendError, ErrorKind

async def work(prompt):
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    if not Path("open").exists():
        raise BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=18_000)
    return "done"
"""
HANGS = """
from pathlib import Path
import anyio

async def work(prompt):
    Path("calls").touch()
    while not Path("open").exists():
        await anyio.sleep(0.01)
    return "done"
"""
_DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


@contextmanager
def shifted(patch: pytest.MonkeyPatch, seconds: float) -> Generator[None]:
    """Set the clock of the run, which takes no store's word for the time."""

    def wall(_clock: Clock) -> float:
        return time.time() + seconds

    with patch.context() as here:
        here.setattr(Clock, "wall", wall)
        yield


def parked(folder: Path, patch: pytest.MonkeyPatch, *words: str) -> Done:
    """Run the plan a day ago: it is parked, and due by now."""
    with shifted(patch, -_DAY):
        return plait_here(folder, "run", "plan.yaml", "--park", *words)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def json_of(folder: Path, *words: str) -> Any:
    return plait_here(folder, *words, "--json").value


def test_a_run_that_parks_ends_with_its_time_the_next_command_and_a_code_of_its_own(folder: Path) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--park")
    assert done.code == 7
    assert "\nparked in " in done.err
    assert "  parked    everything waits until " in done.err
    assert "in 5h" in done.err or "in 4h" in done.err
    assert "  wake      plait wake continues it then" in done.err
    assert calls(folder) == 1
    quiet = plait_here(folder, "resume", "--park", "--quiet")
    assert quiet.code == 7
    assert quiet.err.startswith("plait: run ")
    assert " is parked: everything waits until " in quiet.err
    assert quiet.err.endswith("; next: plait wake\n")
    assert calls(folder) == 1, "nothing is called before the time"


def test_a_parked_run_is_shown_with_its_time(folder: Path) -> None:
    made = plait_here(folder, "run", "plan.yaml", "--park", "--json").value
    assert (made["status"], calls(folder)) == ("parked", 1)
    (listed,) = json_of(folder, "runs", "--status", "parked")
    assert (listed["run_id"], listed["due_at"]) == (made["run_id"], made["due_at"])
    assert " parked until " in plait_here(folder, "runs").out
    shown = plait_here(folder, "show", "last").out
    assert "status    parked until " in shown
    assert "\nwake      plait wake\n" in shown
    (first, second) = json_of(folder, "show", "last")["tasks"]
    assert (first["waits"]["kind"], second["waits"]["kind"]) == ("retry", "upstream")
    followed = plait_here(folder, "log", "last", "--follow")
    assert followed.code == 7
    assert " parked until " in followed.out
    assert "  wake      plait wake" in followed.err


def test_wake_resumes_what_is_due_and_says_what_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    due = parked(folder, monkeypatch, "--json").value["run_id"]
    later = plait_here(folder, "run", "plan.yaml", "--park", "--json").value["run_id"]
    (folder / "open").touch()
    woken = plait_here(folder, "wake")
    assert woken.code == 0
    assert f"run {due} continues" in woken.err
    lines = woken.out.splitlines()
    assert lines[0] == f"run {due} is completed"
    assert lines[1].startswith(f"run {later} is parked until ")
    assert len(lines) == 2
    again = json_of(folder, "wake")
    assert again["woken"] == []
    assert [one["run_id"] for one in again["parked"]] == [later]


def test_wake_parks_a_run_again_whose_limit_has_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = parked(folder, monkeypatch, "--json").value["run_id"]
    assert json_of(folder, "wake")["woken"] == [{"run_id": run_id, "status": "parked", "error": None}]
    assert calls(folder) == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ui", "worker"])
def test_a_page_and_a_worker_wake_a_run_by_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    run_id = parked(folder, monkeypatch, "--json").value["run_id"]
    (folder / "open").touch()
    process = ui(folder) if by == "ui" else fleet.worker(folder, ".plait/plait.db", 1)
    with process:
        fleet.until(lambda: json_of(folder, "show", run_id)["status"] == "completed")
    assert calls(folder) == 3, "the refused call, and one for each task"


@pytest.mark.slow
def test_a_worker_parks_a_run_and_is_free_for_the_next(folder: Path) -> None:
    ids = [plait_here(folder, "run", "plan.yaml", "--queue").out.strip() for _ in range(2)]
    with fleet.worker(folder, ".plait/plait.db", 1):
        fleet.until(lambda: [json_of(folder, "show", one)["status"] for one in ids] == ["parked"] * 2)
    assert {json_of(folder, "show", one)["owner"] for one in ids} == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "code"), [(signal.SIGINT, "interrupted", 6), (signal.SIGTERM, "parked", 7)]
)
def test_a_shutdown_leaves_a_run_to_the_next_wake_and_ctrl_c_does_not(
    folder: Path, number: signal.Signals, status: str, code: int
) -> None:
    (folder / "work.py").write_text(HANGS)
    words = [sys.executable, "-m", "plait", "run", "plan.yaml", "--park"]
    with subprocess.Popen(words, cwd=folder, env=environment(), stderr=subprocess.DEVNULL) as process:
        fleet.until((folder / "calls").exists)
        process.send_signal(number)
        assert process.wait(60) == code
    (folder / "open").touch()
    (run,) = json_of(folder, "runs")
    assert run["status"] == status
    assert [one["status"] for one in json_of(folder, "wake")["woken"]] == (["completed"] if code == 7 else [])


def test_wake_says_what_keeps_a_run_from_going_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = parked(folder, monkeypatch, "--json").value["run_id"]
    (folder / "work.py").unlink()
    woken = plait(folder, "wake")  # in this process, the module is loaded
    assert woken.code == 0
    assert f"run {run_id} is left parked: " in woken.err
    assert "work.py" in woken.err


def test_wake_has_nothing_to_do(folder: Path) -> None:
    (folder / "open").touch()
    plait_here(folder, "run", "plan.yaml")
    assert plait_here(folder, "wake").out == "no run is due, and none is parked\n"


@pytest.mark.parametrize("words", [("--no-store",), ("--queue",)])
def test_only_a_run_that_is_stored_and_executed_here_parks(folder: Path, words: tuple[str, ...]) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--park", *words)
    assert done.code == 2
    assert "--park leaves a stored run until a time" in done.err


def test_the_timer_names_the_store_and_changes_nothing(folder: Path) -> None:
    store = folder / "it's 100%" / "plait.db"
    done = plait_here(folder, "wake", "--install", "--store", str(store))
    assert done.code == 0
    assert not store.exists()
    lines = done.out.splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith(f'"wake" "--store" "{folder}/it\'s 100%%/plait.db"')
    cron = lines[-1].removeprefix("*/5 * * * * ").replace(r"\%", "%")
    assert shlex.split(cron)[1:] == ["wake", "--store", str(store)]
    assert Path(shlex.split(cron)[0]).is_absolute()
    (enabled,) = [line for line in lines if "systemctl" in line]
    name = enabled.split()[-1]
    assert f"# ~/.config/systemd/user/{name}" in lines
    other = serve_commands.timer_text(folder / "other.db")
    assert name not in other, "each store has a timer of its own"


def test_the_timer_of_a_server_shows_no_password(folder: Path) -> None:
    done = plait_here(folder, "wake", "--install", PLAIT_STORE="postgresql://me:secret@db/plait")
    assert done.code == 0
    assert "secret" not in done.out
    assert "postgresql://me" in done.out


@pytest.mark.parametrize("by", ["wake", "worker", "serve"])
def test_what_a_dead_process_left_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("HOOK", receiver.url)
        (folder / "open").touch()
        plan = PLAN.replace("name: limited", "name: limited\nnotify: [{url_env: HOOK, on: [done]}]")
        (folder / "plan.yaml").write_text(plan)
        receiver.status = 503
        with shifted(monkeypatch, -_DAY):
            assert plait_here(folder, "run", "plan.yaml").code == 0
        receiver.status = 200
        if by == "wake":
            assert plait_here(folder, "wake").code == 0
        else:
            more = ["--backends", "plan.yaml", "--port", "0"] if by == "serve" else []
            words = [sys.executable, "-m", "plait", by, *more]
            with Warm(words, cwd=folder, env=environment(HOOK=receiver.url), stdout=PIPE, stderr=STDOUT) as process:
                receiver.arrived.wait(60)
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
        assert [one["id"] for one in receiver.notices] == [receiver.refused[0]["id"]]
