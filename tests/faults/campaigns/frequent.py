"""A healthy run under a SIGKILL every second or so, and a run with a task that kills its process each time.

`python -m tests.faults.campaigns.frequent SEED ...` plays seeds; `--count N` plays the seeds from 0 on. No healthy task
may fail, and the culprit has to: see runner/domain/suspects.py.
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

from plait.runner.domain.suspects import SUSPECTED_AFTER
from plait.runner.domain.task import DEFAULT_RETRY
from tests.faults.campaigns.report import Report, Scale
from tests.support.processes.warm import Warm

RUNS: dict[Scale, int] = {"quick": 3, "nightly": 200}
KILLS: dict[Scale, int] = {"quick": 5, "nightly": 20}
"""The kills of a run, after which the run is left to end."""
CULPRITS: dict[Scale, int] = {"quick": 1, "nightly": 10}
SECONDS = (0.1, 0.1, 0.2, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0)
"""The durations of tasks."""
MOST_DEATHS = SUSPECTED_AFTER + 2 * DEFAULT_RETRY.max_crashes
"""The deaths after which a culprit has to be convicted."""
_LIMIT = 180.0  # seconds that one command may take
_AT_ONCE = 8

WORK = """
import os, signal, anyio

exec(os.environ["PLANT"])

async def work(prompt):
    name, how = prompt.split()[:2]
    if how == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep(float(how))
    return name.upper()
"""
WATCH_S: dict[Scale, float] = {"quick": 3.0, "nightly": 15.0}
"""The seconds that a process lives before a suspect starts: more than the time between two kills."""
BUGS: Mapping[str, tuple[str, str]] = {
    "every death counts": (
        "kills",
        "from plait.runner.recovery import resume_plan\nresume_plan.counts = lambda crashes, *, observed: True",
    ),
    "suspects run beside others": (
        "culprit",
        "from plait.runner.state.run_state import RunState\nRunState.suspects = lambda self: []",
    ),
    "no owner watches": ("culprit", "from plait.runner.recovery import resume\nresume.watches = lambda epoch: False"),
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


def run(*, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
    """The runs that `scale` says, and the planted bugs."""
    began = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        play = partial(play_kills, kills=KILLS[scale], plant=_watching(WATCH_S[scale]))
        playing = pool.map(play, range(seed, seed + RUNS[scale]))
        culprits = list(pool.map(play_culprit, range(seed, seed + CULPRITS[scale])))
        killed = list(playing)
    often = sum(max(one.crashes.values()) >= SUSPECTED_AFTER for one in killed)
    return Report(
        method="frequent kills",
        unit="runs under frequent kills",
        cases=len(killed) + len(culprits),
        violations=(*(w for one in killed for w in judged(one)), *(w for one in culprits for w in judged_culprit(one))),
        planted={bug: is_caught(bug) for bug in BUGS} if planted else {},
        seconds=time.monotonic() - began,
        figures={
            "kills": sum(one.deaths for one in killed),
            "runs with a task cut three times or more": often,
            "most attempts of a task that were cut": max(max(one.crashes.values()) for one in killed),
            "most deaths by a culprit": max(one.deaths for one in culprits),
        },
    )


def play_kills(seed: int, *, kills: int, plant: str = "") -> Played:
    """Run a healthy plan, with a SIGKILL after a random second, at most `kills` times."""
    rng = random.Random(f"frequent {seed}")
    with tempfile.TemporaryDirectory(prefix="plait-frequent-") as place:
        folder, played = Path(place), Played(seed)
        _write(folder, rng, [rng.choice(SECONDS) for _ in range(rng.randint(5, 9))])
        while played.deaths < kills:
            process = _plait(folder, plant, ends_after=0.3 + rng.expovariate(1 / 0.8))
            if process != -signal.SIGKILL:
                break
            played.deaths += 1
        else:
            _plait(folder, plant, ends_after=_LIMIT)
        return _read(folder, played)


def play_culprit(seed: int, *, plant: str = "") -> Played:
    """Run a plan with a task that kills its process each time, until a process survives."""
    rng = random.Random(f"culprit {seed}")
    with tempfile.TemporaryDirectory(prefix="plait-frequent-") as place:
        folder, played = Path(place), Played(seed)
        _write(folder, rng, ["kills", *(rng.choice(SECONDS[:4]) for _ in range(5))])
        while _plait(folder, _watching(1.0) + plant, ends_after=_LIMIT) == -signal.SIGKILL:
            played.deaths += 1
            if played.deaths > MOST_DEATHS:
                break
        return _read(folder, played)


def judged(played: Played) -> list[str]:
    """What is wrong with a healthy run."""
    bad = {name: status for name, status in played.statuses.items() if status != "completed"}
    return [f"seed {played.seed}: {bad} after {played.deaths} kills {played.said}"] if bad else []


def judged_culprit(played: Played) -> list[str]:
    """What is wrong with a run that has a culprit, the task t0."""
    wrong = {name: status for name, status in played.statuses.items() if (status == "completed") == (name == "t0")}
    if played.statuses["t0"] != "failed":
        wrong["t0"] = played.statuses["t0"]
    return [f"culprit {played.seed}: {wrong} after {played.deaths} deaths {played.said}"] if wrong else []


def is_caught(bug: str, seeds: Iterable[int] = range(40)) -> bool:
    """Whether a seed shows the planted bug."""
    kind, plant = BUGS[bug]
    for seed in seeds:
        if kind == "culprit":
            wrong = judged_culprit(play_culprit(seed, plant=plant))
        else:
            wrong = judged(play_kills(seed, kills=KILLS["nightly"], plant=plant))
        if wrong:
            return True
    return False


def _watching(seconds: float) -> str:
    return f"from plait.runner.recovery import resume; resume.WATCH_S = {seconds}\n"


def _write(folder: Path, rng: random.Random, hows: Sequence[object]) -> None:
    lines = ["name: frequent", "concurrency: 4", "backends:", '  w: {kind: function, call: "work.py:work"}', "tasks:"]
    for i, how in enumerate(hows):
        # Nothing depends on the first task, so that all others can complete without it.
        needs = [f"t{n}" for n in rng.sample(range(1, i), min(i - 1, rng.randrange(3)))] if i > 1 else []
        lines.append(f"  - {{id: t{i}, backend: w, depends_on: [{', '.join(needs)}], prompt: 't{i} {how}'}}")
    (folder / "plan.yaml").write_text("\n".join(lines))
    (folder / "work.py").write_text(WORK)


def _plait(folder: Path, plant: str, *, ends_after: float) -> int | None:
    """Run or resume the plan, kill the process after the time, and return its exit code."""
    stored = (folder / ".plait" / "plait.db").exists() and _has_run(folder)
    words = ["resume", "last"] if stored else ["run", "plan.yaml"]
    with (folder / "output").open("wb") as output:
        process = Warm(
            [sys.executable, "-m", "plait", *words],
            cwd=folder,
            env={**os.environ, "PLANT": plant},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                return process.wait(ends_after)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait(_LIMIT)


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
    cut = "SELECT task_id, sum(status = 'interrupted' OR status = 'running') FROM attempts GROUP BY task_id"
    played.crashes = dict(_query(folder, cut))
    played.said = (folder / "output").read_text(errors="replace")[-300:]
    return played


def main(arguments: Sequence[str]) -> int:
    """Play the seeds, or all; 0 when nothing broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaigns.frequent", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=0, help="play the seeds 0 to COUNT-1")
    parser.add_argument("--culprits", type=int, default=0, help="play so many runs with a culprit")
    parser.add_argument("--bugs", action="store_true", help="plant the bugs, too")
    options = parser.parse_args(arguments)
    seeds = options.seeds or range(options.count)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        killed = list(pool.map(partial(play_kills, kills=KILLS["nightly"]), seeds))
        culprits = list(pool.map(play_culprit, range(options.culprits)))
    wrong = [*(w for one in killed for w in judged(one)), *(w for one in culprits for w in judged_culprit(one))]
    print("\n".join(wrong))
    often = sum(max(one.crashes.values()) >= SUSPECTED_AFTER for one in killed)
    most = max((max(one.crashes.values()) for one in killed), default=0)
    print(
        json.dumps(
            {
                "runs": len(killed),
                "kills": sum(one.deaths for one in killed),
                "runs not completed": sum(bool(judged(one)) for one in killed),
                "runs with a task cut three times or more": often,
                "most attempts of a task that were cut": most,
                "culprits": len(culprits),
                "most deaths by a culprit": max((one.deaths for one in culprits), default=0),
                "planted": {bug: is_caught(bug) for bug in BUGS} if options.bugs else {},
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
