"""Workers of a fleet that are killed: `python -m tests.faults.campaigns.fleet [RUNS]`, on SQLite and PostgreSQL.

Four workers execute RUNS runs, and two of them are killed: one at work on its first runs, the other half-way. Every run
completes, no completed task is executed again, and the runs of a killed worker are taken over within the lease and
TAKE_OVER_S seconds. `--planted` plays fleets with planted bugs (tests/support/processes/fleet_worker.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio

from plait.clock_and_ids import parse_time
from plait.events import RunResumed
from plait.persistence.store_records import AttemptRecord, RunRecord
from plait.runner.engine.run_options import open_store, store_place
from tests.faults.campaigns.planted import Shown, try_planted
from tests.faults.campaigns.report import Report, Scale
from tests.support.processes.command import plait_here
from tests.support.processes.fleet import STORES, empty_store, stop, worker
from tests.support.processes.fleet_worker import BUGS, LEASE_S

RUNS = {"quick": 12, "nightly": 60}
WORKERS, AT_ONCE, KILLED = 4, 2, 2
TAKE_OVER_S = 2.0
SHOWN: Mapping[str, Shown] = {
    "completed tasks queued again": Shown("postgres", "is running with"),
    "taken over late": Shown("postgres", "taken over after"),
}
_FEW = 8
"""Runs of a fleet with a planted bug."""
_PLAN = """
inputs: {n: "0"}
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: a, prompt: "{{ n }} a"}
  - {id: b, depends_on: [a], prompt: "{{ n }} b {{ a }}"}
  - {id: c, depends_on: [b], prompt: "{{ n }} c {{ b }}"}
  - {id: d, depends_on: [c], prompt: "{{ n }} d {{ c }}"}
"""
_WORK = """
import os
from pathlib import Path
import anyio

async def work(prompt):
    number, task = prompt.split()[:2]
    with open("begun", "a") as file:
        file.write(f"{number} {task}\\n")
    if task == "b":
        Path(f"at-{os.getpid()}").touch()
    while task == "b" and not Path("go").exists():
        await anyio.sleep(0.01)
    await anyio.sleep(0.2)
    return "done"
"""
_LIMIT_S = 300.0
_NO_END_S = 20.0
"""Seconds after the first kill at which a run without an end counts as shown: ten leases."""


@dataclass
class Facts:
    """A store after all workers have ended."""

    runs: dict[str, RunRecord]
    attempts: dict[str, tuple[AttemptRecord, ...]]
    resumed_at: dict[str, list[float]]
    """The Unix times at which each run was taken over."""


def play(kind: str, folder: Path, runs: int, bug: str = "") -> tuple[list[str], list[float]]:
    """Return what is wrong, and for each run that was taken over the seconds since the death of its worker.

    The workers on a server have the bug, if any.
    """
    store = empty_store(kind, folder)
    (folder / "plan.yaml").write_text(_PLAN)
    (folder / "work.py").write_text(_WORK)
    for number in range(runs):
        done = plait_here(folder, "run", "plan.yaml", "--queue", "--set", f"n={number}", "--store", store)
        assert done.code == 0, done.err
    died: dict[str, float] = {}
    """The time at which the worker of a run was killed."""
    with ExitStack() as stack:
        # Processes of one host see each other's deaths at once; a server's workers are on hosts of their own.
        more = (bug,) if bug else ()
        hosts = [() if kind == "sqlite" else (f"host-{number}", *more) for number in range(WORKERS)]
        workers = [stack.enter_context(worker(folder, store, AT_ONCE, *host)) for host in hosts]
        first, second = workers[:KILLED]
        _until((folder / f"at-{first.pid}").exists)
        died |= _killed(store, first)
        (folder / "go").touch()
        killed_at = time.monotonic()

        def is_over() -> bool:
            # With a bug, the store may refuse to begin a task again, and the run has no end.
            return _completed(store) == runs or (bool(bug) and time.monotonic() > killed_at + _NO_END_S)

        _until(lambda: is_over() or (_completed(store) >= runs // 2 and bool(_owned(store, second.pid))))
        died |= _killed(store, second)
        _until(is_over)
        for one in workers[KILLED:]:
            stop(one)
    return _judge(store, folder, died)


def _killed(store: str, worker: subprocess.Popen[str]) -> dict[str, float]:
    """Kill the worker. Return the time at which it died, for each run that it had."""
    worker.kill()
    at = time.time()
    return dict.fromkeys(_owned(store, worker.pid), at)


def _judge(store: str, folder: Path, died: dict[str, float]) -> tuple[list[str], list[float]]:
    facts = anyio.run(_read, store)
    wrong: list[str] = []
    took = [
        min(at - death for at in facts.resumed_at[run_id] if at > death)
        for run_id, death in died.items()
        if facts.runs[run_id].epoch > 1
    ]
    executed = Counter((folder / "begun").read_text().splitlines())
    for run_id, run in facts.runs.items():
        number = json.loads(run.settings)["inputs"]["n"]
        by_task: dict[str, list[str]] = {}
        for one in facts.attempts[run_id]:
            by_task.setdefault(one.task_id, []).append(one.status)
        for task_id, statuses in by_task.items():
            if statuses != ["interrupted"] * (len(statuses) - 1) + ["completed"] or len(statuses) > run.epoch:
                wrong.append(f"run {number}: the attempts of {task_id} are {statuses}, at epoch {run.epoch}")
            if executed[f"{number} {task_id}"] > len(statuses):
                wrong.append(f"run {number}: {task_id} was executed {executed[f'{number} {task_id}']} times")
        if len(by_task) != 4 or run.status != "completed":
            wrong.append(f"run {number} is {run.status} with {len(by_task)} tasks")
    wrong += [f"taken over after {one:.1f} s" for one in took if one > LEASE_S + TAKE_OVER_S]
    return (wrong if took else [*wrong, "no run was taken over"]), took


async def _read(store: str) -> Facts:
    facts = Facts({}, {}, {})
    async with open_store(store_place(store), "read") as opened:
        for listed in await opened.list_runs(1000):
            run = await opened.get_run(listed.run_id)
            assert run is not None
            facts.runs[run.run_id] = run
            facts.attempts[run.run_id] = await opened.list_attempts(run.run_id)
            told = await opened.list_events(run.run_id, kind=RunResumed.kind)
            facts.resumed_at[run.run_id] = [parse_time(event.at) for event in told]
    return facts


def _completed(store: str) -> int:
    return sum(run.status == "completed" for run in _listed(store))


def _owned(store: str, pid: int) -> list[str]:
    """Return the runs that this worker has."""
    return [run.run_id for run in _listed(store) if run.owner is not None and run.owner.pid == pid]


def _listed(store: str) -> tuple[RunRecord, ...]:
    async def read() -> tuple[RunRecord, ...]:
        async with open_store(store_place(store), "read") as opened:
            return await opened.list_runs(1000)

    return anyio.run(read)


def _until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < ends, f"not done after {_LIMIT_S:g} s"
        time.sleep(0.05)


def run(*, scale: Scale, seed: int = 0) -> Report:
    """One fleet on each store, and the planted bugs."""
    return play_all(RUNS[scale], planted=True)


def is_caught(bug: str) -> bool:
    """Whether a small fleet shows the planted bug as what it is."""
    return SHOWN[bug].within(_play_with(bug))


def _play_with(bug: str) -> list[str]:
    """Return what is wrong with a small fleet that has the bug."""
    with tempfile.TemporaryDirectory() as folder:
        return play(SHOWN[bug].case, Path(folder), _FEW, bug)[0]


def play_all(runs: int, *, planted: bool = False) -> Report:
    """One fleet on each store, with this many runs."""
    began = time.monotonic()
    wrong: list[str] = []
    figures: dict[str, float | int] = {}
    for kind in STORES:
        with tempfile.TemporaryDirectory() as folder:
            found, took = play(kind, Path(folder), runs)
        wrong += [f"{kind}: {one}" for one in found]
        figures |= {
            f"{kind}: runs taken over": len(took),
            f"{kind}: slowest take-over, s": round(max(took, default=0), 2),
        }
    return Report(
        method="fleet",
        unit="runs",
        cases=runs * len(STORES),
        violations=tuple(wrong),
        planted={bug: is_caught(bug) for bug in BUGS} if planted else {},
        seconds=time.monotonic() - began,
        figures=figures,
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--planted"]:
        sys.exit(try_planted(SHOWN, _play_with))
    report = play_all(int(sys.argv[1]) if sys.argv[1:] else RUNS["nightly"])
    print(json.dumps(report.as_json(), indent=2))
    sys.exit(not report.ok)
