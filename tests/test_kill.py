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
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

SEEDS = 50
TASKS = 24

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


async def plait(folder: Path, *arguments: str) -> anyio.abc.Process:
    environment = {**os.environ, "LEDGER": str(folder / "ledger")}
    stderr = (folder / "stderr").open("wb")
    with stderr:
        return await anyio.open_process(
            [sys.executable, "-m", "runner.cli", *arguments], cwd=folder, env=environment, stderr=stderr
        )


async def output(process: anyio.abc.Process) -> bytes:
    assert process.stdout is not None
    text = b"".join([chunk async for chunk in process.stdout])
    await process.wait()
    return text


async def kill_and_resume(folder: Path, seed: int) -> Killed:
    rng = random.Random(seed)
    write_plan(folder, rng)
    kill_at, moment = rng.randrange(1, TASKS + 1), rng.random() * 0.01
    async with await plait(folder, "run", "plan.yaml") as process:
        while (folder / "ledger").stat().st_size < 3 * kill_at and process.returncode is None:  # noqa: ASYNC110 - the witness is a file of another process
            await anyio.sleep(0.001)
        await anyio.sleep(moment)
        landed = process.returncode is None
        if landed:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        landed = process.returncode == -signal.SIGKILL
    acknowledged = set(re.findall(r"(t\d+) completed", (folder / "stderr").read_text()))
    before = ledger(folder)
    async with await plait(folder, "resume", "last", "--json") as process:
        text = await output(process)
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


async def test_sigkill_at_random_moments_then_resume(tmp_path: Path) -> None:
    results: list[Killed] = []

    async def worker(seeds: range) -> None:
        for seed in seeds:
            folder = tmp_path / str(seed)
            folder.mkdir()
            killed = await kill_and_resume(folder, seed)
            check(seed, killed)
            results.append(killed)

    async with anyio.create_task_group() as group:
        group.start_soon(worker, range(0, SEEDS, 2))
        group.start_soon(worker, range(1, SEEDS, 2))
    landed = sum(killed.landed for killed in results)
    assert landed >= SEEDS * 0.8, f"only {landed} of {SEEDS} kills met a live run: the test shows too little"
    assert sum(len(killed.acknowledged) for killed in results) > SEEDS
