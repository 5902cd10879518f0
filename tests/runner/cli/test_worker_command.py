"""`plait worker` and `run --queue`: queued runs, runs whose worker died or was stopped, runs that cannot run here."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest

from plait import SQLiteStore
from plait.clock_and_ids import parse_time
from plait.events import BackendThrottled, RunResumed
from plait.persistence.store_records import AttemptRecord, RunRecord
from tests.support.processes import fleet
from tests.support.processes.command import plait_here
from tests.support.processes.fleet import LIMIT_S, until
from tests.support.processes.fleet_worker import LEASE_S

PLAN = """
inputs: {n: "0"}
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: a, prompt: "{{ n }} a"}
  - {id: b, depends_on: [a], prompt: "{{ n }} b {{ a }}"}
  - {id: c, depends_on: [b], prompt: "{{ n }} c {{ b }}"}
"""
WORK = """
import os
from pathlib import Path
import anyio

async def work(prompt):
    number, task = prompt.split()[:2]
    with open("begun", "a") as file:
        file.write(f"{os.getpid()} {number} {task}\\n")
    while task == "b" and not Path("go").exists():
        await anyio.sleep(0.01)
    return "done"
"""
STORE = Path(".plait/plait.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path


def worker(folder: Path, concurrency: int = 2) -> AbstractContextManager[subprocess.Popen[str]]:
    return fleet.worker(folder, str(STORE), concurrency)


def begun(folder: Path) -> list[list[str]]:
    file = folder / "begun"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def numbers_held_by(folder: Path, pid: int) -> set[str]:
    return {number for by, number, task in begun(folder) if task == "b" and by == str(pid)}


def submit(folder: Path, key: str, *words: str) -> str:
    done = plait_here(folder, "run", "plan.yaml", "--queue", "--set", f"n={key}", "--key", key, *words)
    assert done.code == 0, done.err
    return done.out.strip()


def runs(folder: Path) -> dict[str, RunRecord]:
    async def read() -> dict[str, RunRecord]:
        async with SQLiteStore(folder / STORE, mode="read") as store:
            return {run.run_id: run for run in await store.list_runs(100)}

    return anyio.run(read)


def attempts(folder: Path, run_id: str) -> tuple[AttemptRecord, ...]:
    async def read() -> tuple[AttemptRecord, ...]:
        async with SQLiteStore(folder / STORE, mode="read") as store:
            return await store.list_attempts(run_id)

    return anyio.run(read)


def resumed_at(folder: Path, run_id: str) -> float:
    async def read() -> float:
        async with SQLiteStore(folder / STORE, mode="read") as store:
            (event,) = await store.list_events(run_id, kind=RunResumed.kind)
            return parse_time(event.at)

    return anyio.run(read)


@pytest.mark.slow
def test_a_fleet_completes_every_run_although_one_worker_is_killed_and_one_is_stopped(folder: Path) -> None:
    ids = {str(n): submit(folder, str(n)) for n in range(20)}
    with worker(folder) as first, worker(folder) as second, worker(folder) as third:
        members = first, second, third
        until(lambda: all(len(numbers_held_by(folder, one.pid)) == 2 for one in members))
        killed, stopped = (numbers_held_by(folder, one.pid) for one in (first, second))
        first.kill()
        died = time.time()
        second.send_signal(signal.SIGTERM)
        assert second.wait(LIMIT_S) == 0
        stored = runs(folder)
        (folder / "go").touch()
        until(lambda: {run.status for run in runs(folder).values()} == {"completed"})
        third.send_signal(signal.SIGTERM)
        assert third.wait(LIMIT_S) == 0
    free = {number for number in stopped if stored[ids[number]].owner is None}
    taken = {number for number in stopped if stored[ids[number]].epoch > 1}
    assert free | taken == stopped, "free at once"
    assert max(resumed_at(folder, ids[number]) for number in killed) - died < LEASE_S + 2
    begins = begun(folder)
    for number, run_id in ids.items():
        tries = attempts(folder, run_id)
        cut = {"b"} if number in killed | stopped else set[str]()
        assert [one.status for one in tries if one.task_id == "b"] == (["interrupted"] if cut else []) + ["completed"]
        assert [one.status for one in tries if one.task_id != "b"] == ["completed"] * 2
        assert sum(by == number for _, by, _ in begins) == len(tries), "a completed task was executed twice"


STUBBORN = """
import threading
import time
from pathlib import Path

async def work(prompt):
    Path("begun").touch()
    time.sleep(600)
"""


def test_a_second_sigterm_ends_a_worker_at_once(folder: Path) -> None:
    (folder / "work.py").write_text(STUBBORN)
    submit(folder, "1")
    with worker(folder) as member:
        until((folder / "begun").exists)
        member.send_signal(signal.SIGTERM)
        until(lambda: not _pends(member.pid, signal.SIGTERM))
        member.send_signal(signal.SIGTERM)
        assert member.wait(LIMIT_S) == -signal.SIGTERM


def _pends(pid: int, number: int) -> bool:
    fields = Path(f"/proc/{pid}/status").read_text().split("SigPnd:")[1].split()
    return bool((int(fields[0], 16) | int(fields[2], 16)) >> (number - 1) & 1)


def test_a_run_that_cannot_run_here_is_left_alone_with_one_line(folder: Path) -> None:
    (folder / "other.yaml").write_text("backends: {m: {kind: openai, model: x}}\ntasks: [{id: a, prompt: hello}]\n")
    done = plait_here(folder, "run", "other.yaml", "--queue")
    assert done.code == 0, "no key is needed to submit"
    lost = submit(folder, "lost")
    gone = folder / "gone.yaml"
    (folder / "plan.yaml").rename(gone)
    (folder / "plan.yaml").write_text(PLAN.replace("w: {", "v: {"))
    with worker(folder, 1) as member:
        other = folder / "second.yaml"
        other.write_text(PLAN)
        fine = plait_here(folder, "run", "second.yaml", "--queue").out.strip()
        (folder / "go").touch()
        until(lambda: runs(folder)[fine].status == "completed")
        assert member.stderr is not None
        said = ""
        while said.count("is left to") < 2:  # in which order it takes the three is its own choice
            line = member.stderr.readline()
            assert line, said
            said += line
        said += fleet.stop(member)
    stored = runs(folder)
    assert {stored[done.out.strip()].status, stored[lost].status} == {"queued"}
    for run_id in (done.out.strip(), lost):
        (line,) = [line for line in said.splitlines() if run_id in line]
        assert "is left to other workers for 60 s" in line
    assert "OPENAI_API_KEY" in said and "no longer has a backend 'w'" in said


def test_a_worker_in_the_wrong_folder_says_that_its_store_has_no_run(folder: Path) -> None:
    submit(folder, "1")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    with worker(elsewhere) as member:
        assert member.stderr is not None
        said = member.stderr.readline() + member.stderr.readline()
        assert f"{STORE} has no run yet; if runs were queued elsewhere" in said
    (folder / "go").touch()
    with worker(folder) as member:
        until(lambda: {run.status for run in runs(folder).values()} == {"completed"})
        assert "no run yet" not in fleet.stop(member)


def refused(folder: Path, earlier: str, *words: str) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--queue", *words, "--key", "k")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "key 'k' was used" in done.err and earlier in done.err and "other inputs" in done.err, done.err


def test_a_key_submits_one_run(folder: Path) -> None:
    first = submit(folder, "k")
    assert submit(folder, "k") == first
    own = folder / "plan.yaml"
    refused(folder, first, "--set", "n=other")
    own.write_text(PLAN.replace("{{ n }} c", "{{ n }} C"))
    refused(folder, first, "--set", "n=k")
    own.write_text(PLAN)
    assert submit(folder, "k", "-j", "8") == first
    assert list(runs(folder)) == [first]
    assert plait_here(folder, "run", "plan.yaml", "--queue").out.strip() != first
    assert {run.status for run in runs(folder).values()} == {"queued"}


def test_resume_runs_what_was_submitted(folder: Path) -> None:
    run_id = submit(folder, "k")
    (folder / "go").touch()
    done = plait_here(folder, "resume", run_id)
    assert (done.code, done.out) == (0, "done\n")


def test_a_plan_with_a_mistake_is_not_submitted(folder: Path) -> None:
    (folder / "plan.yaml").write_text("tasks: [{id: a, prompt: '{{ missing }}'}]\n")
    done = plait_here(folder, "run", "plan.yaml", "--queue")
    assert done.code == 2 and "missing" in done.err
    assert not (folder / STORE).exists()


def test_a_run_that_was_begun_comes_before_queued_runs(folder: Path) -> None:
    submit(folder, "begun")
    with worker(folder, 1) as member:
        until(lambda: bool(numbers_held_by(folder, member.pid)))
        fleet.stop(member)
    (folder / "begun").unlink()
    for number in range(9):
        submit(folder, str(number))
    (folder / "go").touch()
    with worker(folder, 1):
        until(lambda: bool(begun(folder)))
    assert begun(folder)[0][1:] == ["begun", "b"]


ASKING = """
inputs: {{n: "0"}}
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", concurrency: 1}}}}
tasks:
  - {{id: a, prompt: one}}
  - {{id: b, prompt: two}}
"""
PAUSE_S = 2.0


class Provider(ThreadingHTTPServer):
    """A server whose quota is used up by the first of two requests at once, for PAUSE_S."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.arrived: list[float] = []
        self.both_arrived = threading.Barrier(2)
        self.go_on = threading.Event()
        self.refused_at = 0.0


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.arrived.append(time.monotonic())
            number = len(self.server.arrived)
        status, body = 200, '{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}'
        if number <= 2:
            self.server.both_arrived.wait(LIMIT_S)
        if number == 1:
            self.server.refused_at = time.monotonic()
            status, body = 429, '{"error": {"message": "You exceeded your current quota"}}'
        elif number == 2:
            self.server.go_on.wait(LIMIT_S)
        self.send_response(status)
        for name, value in (("content-type", "application/json"), ("content-length", len(body))):
            self.send_header(name, str(value))
        self.send_header("retry-after", f"{PAUSE_S:g}")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_what_one_run_is_refused_holds_for_the_other_run_of_the_worker(folder: Path) -> None:
    with Provider() as provider:
        threading.Thread(target=provider.serve_forever, daemon=True).start()
        (folder / "plan.yaml").write_text(ASKING.format(url=provider.url))
        both = {submit(folder, key) for key in "12"}

        def paused() -> set[str]:
            return {run_id for run_id in both if has_event(folder, run_id, BackendThrottled.kind)}

        with worker(folder) as member:
            until(lambda: bool(paused()))
            provider.go_on.set()
            until(lambda: {run.status for run in runs(folder).values()} == {"completed"})
            fleet.stop(member)
        provider.shutdown()
        assert len(provider.arrived) == 5
        assert min(provider.arrived[2:]) - provider.refused_at >= PAUSE_S
        assert paused() == both, "each of them says why it waits"


def has_event(folder: Path, run_id: str, kind: str) -> bool:
    async def read() -> bool:
        async with SQLiteStore(folder / STORE, mode="read") as store:
            return bool(await store.list_events(run_id, kind=kind))

    return anyio.run(read)
