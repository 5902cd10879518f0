"""Several real processes about one run: what a round of theirs showed, and the bugs that are planted in them."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import anyio

from plait import DAG, ParallelRunner, Task
from plait.errors import Fenced, OwnershipLost, RunOwned
from plait.persistence import Batch, RunRecord, SQLiteStore, write_rules
from plait.runner.recovery import resume
from tests.support.processes.forked import Child

RUN = "r"
TASKS = 12
LEASE = 1.0  # seconds
PATIENCE = 60.0  # seconds that anything here may take at most
IMPATIENCE = 0.5  # the same where a planted bug makes it hang

Sabotage: TypeAlias = Literal["no epoch check", "epoch checked outside the transaction", "lease by the wall clock"]


@dataclass(slots=True)
class Facts:
    """What a round showed."""

    seed: int
    first: str = ""
    """How the first owner ended: a run's status, or an error's name."""
    first_pid: int = 0
    others: list[str] = field(default_factory=list[str])
    """How those who wanted the run ended."""
    executions: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Process and task, in the order in which the backends were called."""
    told: list[str] = field(default_factory=list[str])
    """Completions that the first owner told of."""
    before: dict[str, str] = field(default_factory=dict[str, str])
    """The results that were stored when the others came."""
    after: dict[str, str] = field(default_factory=dict[str, str])
    status: str = ""
    epoch: int = 0
    completions: int = 0
    """Attempts that are stored as completed."""
    children_left: int = 0
    """Children of the first owner's backend that are alive."""


class Round:
    """One round in `folder`. What the processes witness goes to files that they append to."""

    def __init__(self, folder: Path, seed: int, sabotage: Sabotage | None) -> None:
        self.path = folder / "runs.db"
        self._called, self._told, self._children = folder / "called", folder / "told", folder / "children"
        self.rng = random.Random(seed)
        self.dag = _dag(self.rng)
        self.sabotage: Sabotage | None = sabotage
        self.patience = IMPATIENCE if sabotage == "no epoch check" else PATIENCE
        self.facts = Facts(seed)
        for witness in (self._called, self._told, self._children):
            witness.touch()

    def deadline(self) -> float:
        return time.monotonic() + self.patience

    def call(self, task_id: str) -> str:
        """The backend is called; what it answers."""
        _append(self._called, f"{os.getpid()} {task_id}")
        return f"{task_id} by {os.getpid()}"

    def calls(self) -> list[str]:
        return self._called.read_text().splitlines()

    def tell(self, task_id: str) -> None:
        """The first owner tells that the task is completed."""
        _append(self._told, task_id)

    def told(self) -> int:
        """How many tasks the first owner has told of."""
        return len(self._told.read_text().split())

    def bear(self, pid: int) -> None:
        """The first owner's backend has a child process."""
        _append(self._children, str(pid))

    def take_stock(self) -> dict[str, str]:
        """The stored results, read by a process of their own: none here may ever have the file open."""
        child = Child(lambda _: json.dumps(anyio.run(self._read)))
        text = child.line(time.monotonic() + PATIENCE)
        child.wait()
        assert text is not None
        results: dict[str, str]
        results, self.facts.status, self.facts.epoch, self.facts.completions = json.loads(text)
        return results

    async def _read(self) -> tuple[dict[str, str], str, int, int]:
        async with SQLiteStore(self.path, mode="read") as store:
            run = await store.get_run(RUN)
            assert run is not None
            results = {task.task_id: task.text or "" for task in await store.list_tasks(RUN) if task.text is not None}
            completions = sum(attempt.status == "completed" for attempt in await store.list_attempts(RUN))
            return results, run.status, run.epoch, completions

    def finish(self) -> Facts:
        """The facts, now that everybody is gone."""
        facts = self.facts
        facts.after = self.take_stock()
        facts.executions = [(int(pid), task_id) for pid, task_id in map(str.split, self.calls())]
        facts.told = self._told.read_text().split()
        left = [int(pid) for pid in self._children.read_text().split() if _is_alive(int(pid))]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        facts.children_left = len(left)
        return facts


def _dag(rng: random.Random) -> DAG:
    """Random dependencies, and a task `hold` that is there from the start."""
    tasks = [Task("hold", prompt="hold", weight=100)]
    for n in range(TASKS):
        upstream = [f"t{m}" for m in rng.sample(range(n), min(n, rng.randrange(3)))]
        tasks.append(Task(f"t{n}", prompt=f"t{n}", depends_on=upstream))
    return DAG(tasks)


def _append(witness: Path, line: str) -> None:
    descriptor = os.open(witness, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def resumed(runner: ParallelRunner) -> str:
    """Resume; how that ended."""
    try:
        return (await runner.resume(RUN)).status.value
    except (RunOwned, OwnershipLost) as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def sabotaged(sabotage: Sabotage | None) -> Generator[None]:
    """With the bug planted in this process."""
    real = write_rules.count_applied

    def unfenced(batch: Batch, head: RunRecord | None) -> int:
        try:
            return real(batch, head)
        except Fenced:
            assert head is not None
            return min(len(batch.events), max(0, head.last_seq - batch.first_seq + 1))

    async def by_wall_clock(config: Any, run: Any, *_: Any) -> bool:
        if (run.record.lease_expires_at or 0) > config.clock.wall():
            raise RunOwned("another process runs it")
        return True

    if sabotage is None:
        yield
    elif sabotage == "lease by the wall clock":
        with mock.patch.object(resume, "wait_for_expiry", by_wall_clock):
            yield
    else:
        with mock.patch.object(write_rules, "count_applied", unfenced):
            yield
