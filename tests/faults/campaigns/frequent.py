"""A healthy run under a SIGKILL every second or so, and a task that kills its process each time beside healthy ones.

`python -m tests.faults.campaigns.frequent SEED ...` plays seeds; `--count N` plays the seeds from 0 on, `--crashers N`
so many crashers in each arrangement. No task may fail, and no healthy task may be asked about; a person has to be asked
about the crasher: see `longest_delay` of runner/recovery/resume_plan.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from plait.runner.recovery.resume_plan import MOST_DEATHS
from tests.faults.campaigns.report import Report, Scale
from tests.support.processes.warm import Warm

RUNS: dict[Scale, int] = {"quick": 3, "nightly": 200}
KILLS: dict[Scale, int] = {"quick": 5, "nightly": 20}
"""The kills of a run, after which the run is left to end."""
CRASHERS: dict[Scale, int] = {"quick": 1, "nightly": 4}
"""The crashers in each arrangement."""
PACE: dict[Scale, float] = {"quick": 0.02, "nightly": 1.0}
"""By this factor the delays and the tasks beside a crasher are shorter than usual."""
SECONDS = (0.1, 0.1, 0.2, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0)
"""The durations of tasks under kills from outside."""
LONG_S = 25.0
"""The duration of the task beside a crasher."""
_LIMIT = 400.0  # seconds that one command may take
_AT_ONCE = 8

WORK = """
import os, signal, anyio

exec(os.environ.get("PLANT", ""))

async def work(prompt):
    name, how, *after = prompt.split()
    if how == "kills":
        await anyio.sleep(float(after[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep(float(how))
    return name.upper()
"""
RUNNERS = """
import anyio, sys
from plait import DAG, ParallelRunner, SQLiteStore, Task
from plait.errors import RunExists
from work import work

async def go(name, prompt):
    async with SQLiteStore(".plait/plait.db") as store:
        runner = ParallelRunner(work, store=store)
        try:
            await runner.run(DAG([Task(name, prompt=prompt)], name=name), run_id=name)
        except RunExists:
            await runner.resume(name)

async def main():
    async with anyio.create_task_group() as both:
        for prompt in sys.argv[1:]:
            both.start_soon(go, prompt.split()[0], prompt)

anyio.run(main)
"""
BUGS: Mapping[str, tuple[str, str]] = {
    "asked after three deaths": (
        "kills",
        "from plait.runner.recovery import resume_plan\nresume_plan.MOST_DEATHS = 3",
    ),
    "no delay": ("one run", "from plait.runner.recovery import resume\nresume.longest_delay = lambda deaths: 0.0"),
    "deaths not counted": (
        "one run",
        "from plait.runner.recovery import resume_plan\nresume_plan.deaths_with = lambda record: 1",
    ),
}
"""Planted bugs: the kind of run that shows the bug, and the code that plants it in every process."""


@dataclass
class Played:
    """What one run showed."""

    seed: int
    deaths: int = 0
    statuses: dict[str, str] = field(default_factory=dict[str, str])
    crashes: dict[str, int] = field(default_factory=dict[str, int])
    """The number of attempts of each task that the death of a process cut."""
    said: str = ""
    """The end of what the last process wrote."""
    seconds: float = 0.0


def run(*, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
    """The runs that `scale` says, and the planted bugs."""
    began = time.monotonic()
    crashers = [(how, one) for how in ARRANGEMENTS for one in range(seed, seed + CRASHERS[scale])]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        playing = pool.map(partial(play_kills, kills=KILLS[scale]), range(seed, seed + RUNS[scale]))
        beside = list(pool.map(lambda one: play_crasher(one[1], how=one[0], pace=PACE[scale]), crashers))
        killed = list(playing)
    return Report(
        method="frequent kills",
        unit="runs under frequent kills",
        cases=len(killed) + len(beside),
        violations=(*(w for one in killed for w in judged(one)), *(w for one in beside for w in judged_crasher(one))),
        planted={bug: is_caught(bug) for bug in BUGS} if planted else {},
        seconds=time.monotonic() - began,
        figures={
            "kills": sum(one.deaths for one in killed),
            "most attempts of a task that were cut": max(max(one.crashes.values()) for one in killed),
            "most deaths of a healthy task beside a crasher": max(one.crashes.get("long", 0) for one in beside),
        },
    )


def play_kills(seed: int, *, kills: int, plant: str = "") -> Played:
    """Run a healthy plan, with a SIGKILL after a random second, at most `kills` times."""
    rng = random.Random(f"frequent {seed}")
    with tempfile.TemporaryDirectory(prefix="plait-frequent-") as place:
        folder, played = Path(place), Played(seed)
        _write_healthy(folder, rng)
        while played.deaths < kills:
            process = _plait(folder, plant, ends_after=0.3 + rng.expovariate(1 / 0.8))
            if process != -signal.SIGKILL:
                break
            played.deaths += 1
        else:
            _plait(folder, plant, ends_after=_LIMIT)
        return _read(folder, played)


def play_crasher(seed: int, *, how: str, pace: float, plant: str = "") -> Played:
    """Run a task that kills its process beside a healthy one, arranged as `how` says, until a process survives."""
    rng = random.Random(f"crasher {seed}")
    fuse = rng.choice((0.0, 0.0, rng.uniform(0, 5))) * pace
    began = time.monotonic()
    paced = (
        f"from plait.runner.recovery import resume, resume_plan\n"
        f"resume.longest_delay = lambda deaths: resume_plan.longest_delay(deaths) * {pace}\n"
    )
    with tempfile.TemporaryDirectory(prefix="plait-frequent-") as place:
        folder, played = Path(place), Played(seed)
        (folder / "work.py").write_text(WORK)
        prompts = (f"bad kills {fuse}", f"long {LONG_S * pace}")
        while ARRANGEMENTS[how](folder, paced + plant, prompts) == -signal.SIGKILL:
            played.deaths += 1
            if played.deaths > MOST_DEATHS + 1:
                break
        played.seconds = time.monotonic() - began
        return _read(folder, played)


def judged(played: Played) -> list[str]:
    """What is wrong with a healthy run."""
    bad = {name: status for name, status in played.statuses.items() if status != "completed"}
    return [f"seed {played.seed}: {bad} after {played.deaths} kills {played.said}"] if bad else []


def judged_crasher(played: Played) -> list[str]:
    """What is wrong with a run that has a crasher, the task `bad`."""
    if (played.statuses, played.deaths) == ({"bad": "waiting_input", "long": "completed"}, MOST_DEATHS):
        return []
    return [f"crasher {played.seed}: {played.statuses} after {played.deaths} deaths {played.said}"]


def is_caught(bug: str, seeds: Iterable[int] = range(40)) -> bool:
    """Whether a seed shows the planted bug."""
    kind, plant = BUGS[bug]
    for seed in seeds:
        if kind in ARRANGEMENTS:
            wrong = judged_crasher(play_crasher(seed, how=kind, pace=PACE["quick"], plant=plant))
        else:
            wrong = judged(play_kills(seed, kills=KILLS["nightly"], plant=plant))
        if wrong:
            return True
    return False


def _write_healthy(folder: Path, rng: random.Random) -> None:
    (folder / "work.py").write_text(WORK)
    tasks: list[tuple[str, str, list[str]]] = []
    for i in range(rng.randint(5, 9)):
        how = rng.choice(SECONDS)
        needs = [f"t{n}" for n in rng.sample(range(i), min(i, rng.randrange(3)))]
        tasks.append((f"t{i}", f"t{i} {how}", needs))
    _write(folder / "plan.yaml", tasks)


def _write(path: Path, tasks: Sequence[tuple[str, str, Sequence[str]]]) -> None:
    """Write a plan of tasks: id, prompt, and the ids of the tasks that it needs."""
    lines = ["name: frequent", "concurrency: 4", "backends:", '  w: {kind: function, call: "work.py:work"}', "tasks:"]
    for name, prompt, needs in tasks:
        lines.append(f"  - {{id: {name}, backend: w, depends_on: [{', '.join(needs)}], prompt: '{prompt}'}}")
    path.write_text("\n".join(lines))


def _in_one_run(folder: Path, plant: str, prompts: Sequence[str]) -> int | None:
    if not (folder / "plan.yaml").exists():
        _write(folder / "plan.yaml", [(one.split()[0], one, []) for one in prompts])
    return _plait(folder, plant, ends_after=_LIMIT)


def _in_two_runs(folder: Path, plant: str, prompts: Sequence[str]) -> int | None:
    """Two runs that one worker executes."""
    for prompt in prompts:
        name = prompt.split()[0]
        if not (folder / f"{name}.yaml").exists():
            _write(folder / f"{name}.yaml", [(name, prompt, [])])
            _command(folder, plant, "-m", "plait", "run", "--queue", f"{name}.yaml", ends_after=_LIMIT)
    words = ("-m", "tests.support.processes.fleet_worker", ".plait/plait.db", "2")
    return _command(folder, plant, *words, ends_after=_LIMIT, until_settled=True)


def _in_two_runners(folder: Path, plant: str, prompts: Sequence[str]) -> int | None:
    """Two runners in one program."""
    (folder / "program.py").write_text(RUNNERS)
    (folder / ".plait").mkdir(exist_ok=True)
    words = ("-c", "import runpy, sys; sys.path.insert(0, ''); runpy.run_path('program.py')", *prompts)
    return _command(folder, plant, *words, ends_after=_LIMIT)


ARRANGEMENTS = {"one run": _in_one_run, "two runs": _in_two_runs, "two runners": _in_two_runners}


def _plait(folder: Path, plant: str, *, ends_after: float) -> int | None:
    """Run or resume the plan, kill the process after the time, and return its exit code."""
    stored = (folder / ".plait" / "plait.db").exists() and _has_run(folder)
    words = ["resume", "last"] if stored else ["run", "plan.yaml"]
    return _command(folder, plant, "-m", "plait", *words, ends_after=ends_after)


def _command(folder: Path, plant: str, *words: str, ends_after: float, until_settled: bool = False) -> int | None:
    """Run Python, kill the process after the time, and return its exit code. With `until_settled` the process is asked
    to end as soon as every task is done or waits for a person.
    """
    ends = time.monotonic() + ends_after
    with (folder / "output").open("wb") as output:
        process = Warm(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PLANT": plant},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with process:
            while time.monotonic() < ends:
                try:
                    return process.wait(0.3 if until_settled else ends_after)
                except subprocess.TimeoutExpired:
                    if until_settled and _is_settled(folder):
                        process.terminate()
                        return process.wait(_LIMIT)
            process.kill()
            return process.wait(_LIMIT)


def _is_settled(folder: Path) -> bool:
    return not _query(folder, "SELECT count(*) FROM tasks WHERE status IN ('pending', 'running')")[0][0]


def _has_run(folder: Path) -> bool:
    return bool(_query(folder, "SELECT count(*) FROM runs")[0][0])


def _query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{folder / '.plait' / 'plait.db'}?mode=ro", uri=True)) as database:
        try:
            return database.execute(sql).fetchall()
        except sqlite3.OperationalError:  # killed before the tables were there
            return [(0,)]


def _read(folder: Path, played: Played) -> Played:
    played.statuses = dict(_query(folder, "SELECT task_id, status FROM tasks"))
    interrupted = "SELECT count(*) FROM attempts AS a WHERE a.task_id = t.task_id AND a.status = 'interrupted'"
    cut = f"SELECT task_id, (status = 'running') + ({interrupted}) FROM tasks AS t"
    played.crashes = dict(_query(folder, cut))
    played.said = (folder / "output").read_text(errors="replace")[-300:]
    return played


def main(arguments: Sequence[str]) -> int:
    """Play the seeds, or all; 0 when nothing broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.frequent", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0, help="play the seeds 0 to COUNT-1")
    parser.add_argument("--crashers", type=int, default=0, help="play so many crashers in each arrangement")
    parser.add_argument("--pace", type=float, default=1.0, help="shorten the delays and tasks beside a crasher")
    parser.add_argument("--bugs", action="store_true", help="plant the bugs, too")
    options = parser.parse_args(arguments)
    seeds = options.seeds or range(options.count)
    crashers = [(how, one) for how in ARRANGEMENTS for one in range(options.crashers)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        killed = list(pool.map(partial(play_kills, kills=KILLS["nightly"]), seeds))
        beside = list(pool.map(lambda one: play_crasher(one[1], how=one[0], pace=options.pace), crashers))
    wrong = [*(w for one in killed for w in judged(one)), *(w for one in beside for w in judged_crasher(one))]
    print("\n".join(wrong))
    ends = [status for one in killed for status in one.statuses.values()]
    print(
        json.dumps(
            {
                "runs": len(killed),
                "kills": sum(one.deaths for one in killed),
                "tasks": len(ends),
                "failed": ends.count("failed"),
                "asked": ends.count("waiting_input"),
                "not completed": len(ends) - ends.count("completed"),
                "most attempts of a task that were cut": max((max(one.crashes.values()) for one in killed), default=0),
                "crashers": len(beside),
                "deaths of the task beside a crasher": [one.crashes.get("long", 0) for one in beside],
                "seconds of the longest": round(max((one.seconds for one in beside), default=0)),
                "planted": {bug: is_caught(bug) for bug in BUGS} if options.bugs else {},
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
