"""`plait resume` and Ctrl-C: what was done stays done, what was under way is done again, and nothing hangs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.plans.logged import calls, make, wait_for_call
from tests.support.processes import warm
from tests.support.processes.command import PLAIT, Terminal, environment, plait, plait_here
from tests.support.processes.warm import Warm
from tests.support.stores.database import attempts_of, edit, edit_runs

HELD = """
  - {id: a, prompt: one}
  - {id: b, prompt: two, backend: hold, depends_on: a}
  - {id: c, prompt: "three {{ b }}", depends_on: b}
"""


@contextmanager
def running(folder: Path, *words: str) -> Generator[Warm]:
    process = Warm(
        [*PLAIT, "run", "plan.yaml", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def interrupted_run(folder: Path) -> Path:
    """A folder with one run that was killed while task b was under way."""
    plan = make(folder, HELD, hold="hold")
    with running(folder) as process:
        wait_for_call(folder, "two")
        process.kill()
    return plan


def test_ctrl_c_stops_the_run_and_resume_goes_on_with_it(tmp_path: Path) -> None:
    make(tmp_path, HELD, hold="hold")
    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        wait_for_call(tmp_path, "two")
        terminal.press_ctrl_c()
        assert terminal.wait() == 6
    seen = terminal.seen.decode()
    assert "stopping" in seen
    assert "interrupted" in seen
    printed = re.search(r"plait (resume \S+)", seen)
    assert printed is not None
    assert "\x1b[?25h" in seen

    (tmp_path / "go").touch()
    resumed = plait(tmp_path, *printed[1].split())
    assert (resumed.code, resumed.out) == (0, "re: three held: two\n")
    assert "3 of 3 tasks completed, reused 1, ran 2" in resumed.err
    assert calls(tmp_path) == ["one", "two", "two", "three held: two"]


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one, backend: stubborn}\n", stubborn="stubborn")
    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        wait_for_call(tmp_path, "one")
        terminal.press_ctrl_c()
        terminal.until("a second signal exits at once")
        terminal.press_ctrl_c()
        assert terminal.wait() == -signal.SIGINT  # 130 in a shell
    assert terminal.seen.rfind(b"\x1b[?25h") > terminal.seen.rfind(b"\x1b[?25l")
    assert b"Traceback" not in terminal.seen
    assert plait_here(tmp_path, "runs", "--json").value[0]["status"] == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("function", ["sleep", "seize", "finish"])
def test_a_second_signal_ends_the_process_whatever_it_does(
    tmp_path: Path, function: str, number: signal.Signals
) -> None:
    """The first signal finds an event loop that is blocked: by Python, by a library that holds the interpreter, or not
    at all.
    """
    make(tmp_path, HELD, hold=function)
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "two")
        process.send_signal(number)
        wait_until_default(process.pid, number)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == -number
    (run,) = plait_here(tmp_path, "runs", "--json").value
    assert (run["status"], run["done"]) == ("interrupted", 1)
    (tmp_path / "go").touch()
    assert plait_here(tmp_path, "resume").code == 0
    assert calls(tmp_path) == ["one", "two", "two", "three held: two"]


def wait_until_default(pid: int, number: int) -> None:
    """Wait until the first signal was delivered, and the system would end the process at the next one."""
    ends = time.monotonic() + 60
    while int(re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[0], 16) >> (number - 1) & 1:
        assert time.monotonic() < ends, f"signal {number} is still caught"
        time.sleep(0.01)


def test_a_function_that_blocks_its_thread_does_not_keep_the_process(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one, backend: block}\n", block="block")
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "one")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "plait resume" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_are_like_ctrl_c_and_a_live_run_is_not_taken_over(tmp_path: Path, number: int) -> None:
    make(tmp_path, HELD, hold="hold")
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "two")
        assert plait_here(tmp_path, "runs", "--json").value[0]["status"] == "running"
        for words in (["resume", "last"], ["continue", "last", "a", "hello"]):
            refused = plait_here(tmp_path, *words)
            assert (refused.code, refused.out) == (2, "")
            assert f"is being run by process {process.pid}" in refused.err
        assert "nothing to resume" in plait_here(tmp_path, "resume").err
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "plait resume" in err
    assert calls(tmp_path) == ["one", "two"]


def test_a_terminal_that_goes_away_says_so_more_than_once(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one, backend: finish}\n", finish="finish")
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "one")
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        assert any("stopping" in line for line in process.stderr)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "1 of 1 task completed" in err) == (0, True), err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_in_the_background_of_a_script_ctrl_c_is_meant_for_the_script(tmp_path: Path, number: signal.Signals) -> None:
    make(tmp_path, HELD, hold="finish")
    trap = f'trap "" {number.name.removeprefix("SIG")}; exec "$@"'
    words = ["sh", "-c", trap, "sh", *PLAIT, "run", "plan.yaml"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_for_call(tmp_path, "two")
        process.send_signal(number)
        (tmp_path / "go").touch()
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "3 of 3 tasks completed" in err) == (0, True), err


def test_a_killed_run_is_shown_as_interrupted_and_is_the_one_to_resume(tmp_path: Path) -> None:
    interrupted_run(tmp_path)
    (run,) = plait_here(tmp_path, "runs", "--json").value
    assert (run["status"], run["done"], run["total"]) == ("interrupted", 1, 3)
    assert "plait resume" in plait_here(tmp_path, "show", "last").out
    (tmp_path / "go").touch()
    resumed = plait_here(tmp_path, "resume", "--json")
    assert (resumed.code, resumed.value["status"]) == (0, "completed")
    assert (resumed.value["reused"], resumed.value["ran"]) == (1, 2)
    assert calls(tmp_path).count("one") == 1

    again = plait_here(tmp_path, "resume", run["run_id"][:-2])
    assert (again.code, again.out) == (0, "")
    assert "is completed, nothing is left to do" in again.err
    assert f"plait show {run['run_id']}" in again.err
    assert "nothing to resume" in plait_here(tmp_path, "resume").err


def test_functions_come_from_the_plan_file_as_it_is_now(tmp_path: Path) -> None:
    plan = interrupted_run(tmp_path)
    (tmp_path / "new.py").write_text("async def answer(prompt): return 'new: ' + prompt\n")
    plan.write_text(plan.read_text().replace("functions.py:hold", "new.py:answer"))
    resumed = plait_here(tmp_path, "resume", "-q")
    assert (resumed.code, resumed.out) == (0, "re: three new: two\n")


def test_a_plan_that_is_gone_or_has_lost_its_function_is_one_clear_line(tmp_path: Path) -> None:
    plan = interrupted_run(tmp_path)
    text = plan.read_text()
    plan.write_text(text.replace("  hold:", "  held:"))
    lost = plait_here(tmp_path, "resume")
    assert (lost.code, len(lost.err.splitlines())) == (2, 1)
    assert "no longer has a backend 'hold'" in lost.err

    moved = tmp_path / "moved"
    moved.mkdir()
    plan.rename(moved / "plan.yaml")
    (tmp_path / "functions.py").rename(moved / "functions.py")
    (moved / "plan.yaml").write_text(text)
    gone = plait_here(tmp_path, "resume")
    assert (gone.code, len(gone.err.splitlines())) == (2, 1)
    assert "--plan PATH" in gone.err
    assert calls(tmp_path) == ["one", "two"]

    (tmp_path / "go").touch()
    resumed = plait_here(tmp_path, "resume", "--plan", "moved/plan.yaml", "-q")
    assert (resumed.code, resumed.out) == (0, "re: three held: two\n")


def test_a_dry_run_names_the_damaged_results_of_a_run_that_is_over(tmp_path: Path) -> None:
    make(tmp_path, '  - {id: a, prompt: one}\n  - {id: b, prompt: "two {{ a }}", depends_on: a}\n')
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    whole = plait_here(tmp_path, "resume", "last", "--dry-run")
    assert (whole.code, "is completed; nothing is left to do" in whole.out, "damaged" in whole.out) == (0, True, False)
    edit(tmp_path / ".plait" / "plait.db", attempts_of("a", "text = 'another'"))
    told = plait_here(tmp_path, "resume", "last", "--dry-run").out.splitlines()
    assert "a: the stored result does not fit its checksum" in told[0]
    assert "--retry-failed runs the task again" in told[0]
    assert told[-1].endswith("is completed; 1 damaged result, counted as failed: a")
    assert plait_here(tmp_path, "resume", "last", "--dry-run", "--json").value["damaged"] == ["a"]
    again = plait_here(tmp_path, "resume", "last", "--retry-failed", "--dry-run", "--json").value
    assert (again["runs"], again["damaged"]) == (1, [])


def test_retry_failed_runs_what_failed_and_what_it_blocked(tmp_path: Path) -> None:
    tasks = '  - {id: a, prompt: one}\n  - {id: x, prompt: knock, backend: fail}\n  - {id: y, prompt: "{{ x }}"}\n'
    make(tmp_path, tasks.replace('"{{ x }}"', '"{{ x }}", depends_on: x'), fail="fail")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    (tmp_path / "go").touch()
    kept = plait_here(tmp_path, "resume", "last")
    assert kept.code == 1
    assert "--retry-failed runs what failed again" in kept.err
    assert "--retry-failed runs what failed again" in plait_here(tmp_path, "resume", "last", "--dry-run").out
    resumed = plait_here(tmp_path, "resume", "--retry-failed", "--json")
    assert (resumed.code, resumed.value["reused"], resumed.value["ran"]) == (0, 1, 2)
    assert sorted(calls(tmp_path)) == ["in: knock", "knock", "knock", "one"]


PYTHON_MADE = """
import anyio
from plait import DAG, ParallelRunner, Task
from plait.persistence import SQLiteStore
async def main():
    async def stop(prompt): run.stop(); await anyio.sleep_forever()
    async with SQLiteStore('runs.db') as store:
        async with ParallelRunner(stop, store=store).start(DAG([Task('a', 'x')])) as run: pass
anyio.run(main)
"""


def test_a_run_that_python_made_says_how_to_go_on(tmp_path: Path) -> None:
    warm.run([PLAIT[0], "-c", PYTHON_MADE], cwd=tmp_path, env=environment(), timeout=60).check_returncode()
    refused = plait_here(tmp_path, "resume", "--store", "runs.db")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "ParallelRunner(...).resume(run_id)" in refused.err
    assert "plait resume" not in plait_here(tmp_path, "show", "last", "--store", "runs.db").out
    found = plait_here(tmp_path, "doctor", "--store", "runs.db").out
    advice = "resume the run from Python, or name its backends: .* --backends FILE$"
    assert re.search(f"is interrupted.*; {advice}", found, re.MULTILINE)


def test_resume_without_a_name_passes_over_runs_that_python_made(tmp_path: Path) -> None:
    interrupted_run(tmp_path)
    (ours,) = plait_here(tmp_path, "runs", "--json").value
    warm.run(
        [PLAIT[0], "-c", PYTHON_MADE.replace("runs.db", ".plait/plait.db")], cwd=tmp_path, env=environment(), timeout=60
    )
    newest, before = plait_here(tmp_path, "runs", "--json").value
    assert (newest["status"], before["run_id"]) == ("interrupted", ours["run_id"])
    (tmp_path / "go").touch()
    resumed = plait_here(tmp_path, "resume", "--json")
    assert (resumed.code, resumed.value["run_id"], resumed.value["status"]) == (0, ours["run_id"], "completed")


def test_a_store_that_goes_away_costs_no_result_and_is_told(tmp_path: Path) -> None:
    make(tmp_path, HELD, hold="hold")
    with running(tmp_path, "--json") as process:
        wait_for_call(tmp_path, "two")
        (tmp_path / ".plait").rename(tmp_path / "away")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    (degraded,) = json.loads(out)["degraded"]
    assert degraded["lost"] > 0
    assert "removed or replaced" in degraded["error"]
    assert re.search(r"^  store     it failed from \S+ to the end: \d+ changes? not stored: ", err, re.MULTILINE)


def test_a_key_is_not_sent_to_a_server_that_only_the_store_names(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/v1"  # nobody listens there: whoever goes there fails with 1
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        f"backends:\n  api: {{kind: openai, model: m, base_url: '{url}'}}\n"
        "defaults: {retry: {attempts: 1}}\ntasks:\n  - {id: a, prompt: hello}\n"
    )
    assert plait(tmp_path, "run", "plan.yaml", OPENAI_API_KEY="canary-key").code == 1
    again = ("resume", "last", "--retry-failed")
    assert plait(tmp_path, *again, OPENAI_API_KEY="canary-key").code == 1, "the plan file still says so"
    plan.write_text(plan.read_text().replace("127.0.0.1", "localhost"))
    refused = plait(tmp_path, *again, OPENAI_API_KEY="canary-key")
    assert refused.code == 2
    assert f"sends the key in OPENAI_API_KEY to {url}, so a plan file has to have it as stored" in refused.err
    assert "canary" not in refused.err
    assert plait(tmp_path, *again).code == 1, "without a key there is nothing to give away"
    assert plait(tmp_path, *again, OPENAI_API_KEY="canary-key", OPENAI_BASE_URL=url).code == 1
    plan.write_text(plan.read_text().replace("http://localhost:9", "https://api.openai.com"))
    usual = {"OPENAI_API_KEY": "canary-key", "HTTPS_PROXY": "http://127.0.0.1:9"}
    assert plait(tmp_path, "run", "plan.yaml", **usual).code == 1
    plan.unlink()
    assert plait(tmp_path, *again, **usual).code == 1, "it goes there by itself"


def test_a_run_that_is_stored_in_another_format_is_refused_in_one_line(tmp_path: Path) -> None:
    make(tmp_path, HELD, hold="hold")
    (tmp_path / "go").touch()
    assert plait_here(tmp_path, "run", "plan.yaml", "-q", "--store", "runs.db").code == 0
    edit_runs(tmp_path / "runs.db", "settings = json_set(settings, '$.format', 2)")
    [run] = plait_here(tmp_path, "runs", "--json", "--store", "runs.db").value
    (tmp_path / "log").unlink()
    for words in (("resume",), ("resume", "--dry-run"), ("continue", "a", "more")):
        done = plait_here(tmp_path, words[0], run["run_id"], *words[1:], "--store", "runs.db")
        assert (done.code, done.out) == (3, ""), done.err
        assert done.err == (
            f"plait: run {run['run_id']!r} was stored by a development version of plait (format 2); this plait reads "
            "format 100 only. Start a new run\n"
        )
    assert not (tmp_path / "log").exists(), "a task was run"
