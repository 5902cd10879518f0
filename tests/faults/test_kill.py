"""SIGKILL of a real `plait run` at random moments, then `plait resume`.

The witness is a file that the backend itself appends to before it works; what was acknowledged is what the command had
printed. Neither comes from the store.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.warm import Warm
from tests.support.sizes import size

pytestmark = pytest.mark.slow

SEEDS = size(6, 15)
COLD = 5  # every so many seeds
TASKS = 24
LIMIT = 60.0  # seconds that one command may take

WORK = """
import os, random, anyio

async def work(prompt):
    with open(os.environ["LEDGER"], "a") as ledger:
        ledger.write(prompt.split()[0] + "\\n")
    await anyio.sleep(random.random() * 0.02)
    return prompt.split()[0].upper()
"""


@dataclass
class Killed:
    """What one seed showed."""

    landed: bool
    acknowledged: set[str]
    before: Counter[str]
    after: Counter[str]
    result: dict


def write_plan(folder: Path, rng: random.Random) -> None:
    """Random dependencies, every result used by those who depend on it."""
    lines = ["name: killed", "concurrency: 4", "backends:", '  w: {kind: function, call: "work.py:work"}', "tasks:"]
    for i in range(TASKS):
        needs = [f"t{n}" for n in rng.sample(range(i), min(i, rng.randrange(3)))]
        uses = " ".join(f"{{{{ {n} }}}}" for n in needs)
        lines.append(f"  - {{id: t{i}, backend: w, depends_on: [{', '.join(needs)}], prompt: 't{i} {uses}'}}")
    (folder / "plan.yaml").write_text("\n".join(lines))
    (folder / "work.py").write_text(WORK)
    (folder / "ledger").touch()


def ledger(folder: Path) -> Counter[str]:
    return Counter((folder / "ledger").read_text().split())


def plait(folder: Path, seed: int, *words: str, **options: Any) -> Warm | subprocess.Popen[str]:
    """The command; some of them in an interpreter of their own, as a person starts it."""
    start = partial(subprocess.Popen, text=True) if seed % COLD == 0 else Warm
    command = [sys.executable, "-m", "plait", *words]
    with (folder / "stderr").open("wb") as stderr:
        return start(
            command, cwd=folder, env={**os.environ, "LEDGER": str(folder / "ledger")}, stderr=stderr, **options
        )


def kill_and_resume(folder: Path, seed: int) -> Killed:
    rng = random.Random(seed)
    write_plan(folder, rng)
    kill_at, moment = rng.randrange(1, TASKS + 1), rng.random() * 0.01
    with plait(folder, seed, "run", "plan.yaml", stdout=subprocess.DEVNULL) as process:
        while (folder / "ledger").stat().st_size < 3 * kill_at and process.poll() is None:
            time.sleep(0.001)  # the witness is a file of another process
        time.sleep(moment)
        process.kill()
        landed = process.wait(LIMIT) == -signal.SIGKILL
    acknowledged = set(re.findall(r"(t\d+) completed", (folder / "stderr").read_text()))
    before = ledger(folder)
    with plait(folder, seed, "resume", "last", "--json", stdout=subprocess.PIPE) as process:
        text = process.communicate(timeout=LIMIT)[0]
        assert process.returncode == 0, (folder / "stderr").read_text()
    return Killed(landed, acknowledged, before, ledger(folder), json.loads(text))


def check(seed: int, killed: Killed) -> None:
    assert killed.result["status"] == "completed", seed
    tasks = killed.result["tasks"]
    statuses = {task["status"] for task in (tasks.values() if isinstance(tasks, dict) else tasks)}
    assert statuses == {"completed"}, seed
    assert len(killed.after) == TASKS, seed
    for task_id, times in killed.after.items():
        most = 1 if task_id in killed.acknowledged else 2
        assert times <= most, f"seed {seed}: {task_id} was executed {times} times"
    under_way = [t for t in killed.after if killed.after[t] > 1]
    assert len(under_way) <= 4, f"seed {seed}: only what was under way may run again"


def test_sigkill_at_random_moments_then_resume(tmp_path: Path) -> None:
    def trial(seed: int) -> Killed:
        folder = tmp_path / str(seed)
        folder.mkdir()
        return kill_and_resume(folder, seed)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(trial, range(SEEDS)))
    for seed, killed in enumerate(results):
        check(seed, killed)
    landed = sum(killed.landed for killed in results)
    assert landed >= SEEDS * 0.8, f"only {landed} of {SEEDS} kills met a live run: the test shows too little"
    assert sum(len(killed.acknowledged) for killed in results) > SEEDS
