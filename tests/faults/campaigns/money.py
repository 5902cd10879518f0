"""Random runs within a budget: parallel calls of random cost, SIGKILL at random boundaries, resumes and raises.

The provider charges a call as it begins, and writes that into a file which plait does not know: what a killed process
had called is paid for. Never may the bill exceed the highest budget that was given so far, nor that of one task its
`max_cost`; and at the end nothing may be left reserved.

`python -m tests.faults.campaigns.money SEED ...` plays seeds, `--count N` those from 0 on, `--planted` the bugs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel

from plait import DAG, ParallelRunner, Retry, RunStatus, SQLiteStore, Task, TaskStatus, failpoints
from plait.backends import Conversation, ConversationRequest, Reply
from plait.backends.prices import Billing, Price
from plait.errors import BackendError, ErrorKind
from plait.persistence.store_records import TaskRecord
from plait.runner.recovery import resume
from plait.runner.state import budget as money
from plait.runner.state.budget import Budget
from plait.runner.state.run_state import RunState
from plait.usage import Usage
from tests.faults.campaigns import killed_runs
from tests.faults.campaigns.killed_runs import Campaign, in_a_process
from tests.faults.campaigns.report import Scale

RUNS: dict[Scale, int] = {"quick": 40, "nightly": 1_000}
MOST = 4
"""The most that a call costs, in US dollars: as many tokens, a dollar each."""
_KILLS = 7
"""A person is asked about a task at the tenth death of its process."""
_ROUNDS = 60
_CLOSE = 1e-6


@dataclass(frozen=True)
class Story:
    """One run, by its seed."""

    tasks: tuple[Task, ...]
    budget: float
    concurrency: int

    @classmethod
    def of(cls, seed: int) -> Story:
        rng = random.Random(f"money {seed}")
        number = rng.randint(4, 12)
        tasks: list[Task] = []
        for n in range(number):
            needs = [f"t{one}" for one in rng.sample(range(n), min(n, rng.choice((0, 0, 0, 1, 2))))]
            limit = rng.choice((None, None, None, rng.uniform(0, 6)))
            backend = "free" if rng.random() < 0.15 else "paid"
            retry = Retry(attempts=rng.choice((1, 3)), base_delay=0.0)
            tasks.append(Task(f"t{n}", f"prompt {n}", needs, backend, retry=retry, max_cost=limit, failure_mode="skip"))
        return cls(tuple(tasks), rng.uniform(0, MOST * number), rng.randint(1, 6))


class Provider:
    """Charges each call in `bill`, a line each: the task, its cost."""

    def __init__(self, bill: Path, rng: random.Random) -> None:
        self._bill = bill
        self._rng = rng

    @property
    def billing(self) -> Billing:
        return Billing(None, "m", price=Price(input=0.0, output=1_000_000.0), max_output_tokens=MOST)

    def new_session_id(self) -> str | None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        yield _Call(self, request.idempotency_key.partition(":")[2])

    async def call(self, task_id: str, prompt: str) -> Reply:
        rng = self._rng
        cost, fate = rng.uniform(0, MOST), rng.random()
        cost = 0.0 if fate < 0.1 else MOST if fate < 0.2 else cost
        with self._bill.open("a") as bill:
            bill.write(f"{task_id} {cost!r}\n")
        for _ in range(rng.randint(0, 6)):
            await anyio.lowlevel.checkpoint()
        if fate < 0.1:
            raise BackendError(ErrorKind.OVERLOADED, "full")
        if fate > 0.9:
            raise BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(1, 1, cost))
        if fate > 0.85:
            raise BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(cost_is_partial=True))
        return Reply(prompt, usage=Usage(1, 1, cost))


@dataclass
class _Call:
    provider: Provider
    task_id: str
    session_id: str | None = None

    async def send(self, prompt: str) -> Reply:
        return await self.provider.call(self.task_id, prompt)


@dataclass
class Told(killed_runs.Told):
    """What one run showed."""

    raises: int = 0
    calls: int = 0


def tell(seed: int, bug: str | None = None) -> Told:
    """Play one seed to its end, in processes of its own. Call it in a process without threads."""
    story, told, rng = Story.of(seed), Told("money", seed), random.Random(f"kills {seed}")
    limits = {"": story.budget, **{task.id: task.max_cost for task in story.tasks if task.max_cost is not None}}
    with tempfile.TemporaryDirectory(prefix="plait-money-") as place:
        folder, answers = Path(place), dict[tuple[str, str], float]()
        for turn in range(_ROUNDS):
            kill = rng.randint(1, 60) if told.kills.total() < _KILLS else None
            ended = in_a_process(partial(_execute, story, folder, answers, kill, seed * 1_000 + turn, bug), folder)
            _judge(folder, limits, told)
            if told.violations:
                return told
            if isinstance(ended, str):
                told.kills[ended] += 1
                continue
            if ended["status"] != RunStatus.WAITING_INPUT:
                _judge_end(ended, told)
                return told
            answers = {}
            for task_id, way, limit in ended["asks"]:
                answers[task_id, way] = limit + rng.uniform(0.1, 2 * MOST)
                key = "" if way == "budget" else task_id
                limits[key] = max(limits.get(key, 0.0), answers[task_id, way])
                told.raises += 1
            if not answers:
                told.broken("the run waits, and nothing asks")
                return told
        told.broken(f"no end after {_ROUNDS} processes")
    return told


def _judge(folder: Path, limits: Mapping[str, float], told: Told) -> None:
    """Compare the bill with the limits given so far."""
    bill = folder / "bill"
    lines = [line.split() for line in bill.read_text().splitlines()] if bill.exists() else []
    told.calls = len(lines)
    paid = Counter[str]()
    for task_id, cost in lines:
        paid[task_id] += float(cost)  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
    total = sum(paid.values())
    if total > limits[""] + _CLOSE:
        told.broken(f"{total:.4f} spent of {limits['']:.4f}")
    for task_id, cost in paid.items():
        if cost > limits.get(task_id, float("inf")) + _CLOSE:
            told.broken(f"{cost:.4f} spent by {task_id} of {limits[task_id]:.4f}")


def _judge_end(ended: Mapping[str, Any], told: Told) -> None:
    if ended["status"] != RunStatus.COMPLETED or ended.get("unfinished"):
        told.broken(f"the run is {ended['status']}, unfinished are {ended.get('unfinished')}")
    if ended.get("reserved"):
        told.broken(f"{ended['reserved']} reserved for ever")


def _execute(
    story: Story, folder: Path, answers: Mapping[tuple[str, str], float], kill: int | None, seed: int, bug: str | None
) -> dict[str, Any]:
    """Begin the run, or go on with it, until it ends or waits, or until the boundary number `kill`."""
    reached = 0

    def count(name: str) -> None:
        nonlocal reached
        reached += 1
        if reached == kill:
            (folder / "boundary").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.on_reach = count
    plant = nullcontext if bug is None else BUGS[bug]
    with plant(), mock.patch.object(resume, "longest_delay", return_value=0.0):
        return anyio.run(_go_on, story, folder, answers, random.Random(seed))


async def _go_on(
    story: Story, folder: Path, answers: Mapping[tuple[str, str], float], rng: random.Random
) -> dict[str, Any]:
    async def free(prompt: str) -> str:
        return prompt

    backends = {"paid": Provider(folder / "bill", rng), "free": free}
    async with SQLiteStore(folder / "runs.db") as store:
        options: dict[str, Any] = {"backends": backends, "default": "paid", "concurrency": story.concurrency}
        if await store.get_run("r") is None:
            run = await ParallelRunner(**options, store=store, budget=story.budget).run(DAG(story.tasks), run_id="r")
        else:
            runner = ParallelRunner(**options, store=store)
            least = {(one, way): usd for one, way, usd in _asks(await store.list_tasks("r"))}
            # After a kill the task may have asked once more: for more than it was given, or for the other limit.
            fitting = {one: usd for (one, way), usd in answers.items() if usd > least.get((one, way), inf)}
            run = await runner.resume("r", answers=fitting)
        failpoints.on_reach = None
        record = await store.get_run("r")
        assert record is not None
        left = await money.stored_budget(store, "r", json.loads(record.settings), story.tasks)
        tasks = await store.list_tasks("r")
    assert left is not None
    return {
        "status": run.status.value,
        "asks": _asks(tasks),
        "unfinished": [one.task_id for one in tasks if one.status in {TaskStatus.PENDING, TaskStatus.RUNNING}],
        "reserved": {task_id: usd for task_id, usd in left.reserved.items() if usd},
    }


def _asks(tasks: Sequence[TaskRecord]) -> list[tuple[str, str, float]]:
    """Return the questions for money: the task, the limit that it asks about, and what an answer has to exceed."""
    asked = {one.task_id: json.loads(one.asked or "{}") for one in tasks if one.status == TaskStatus.WAITING_INPUT}
    return [(name, form["way"], form["schema"]["exclusiveMinimum"]) for name, form in asked.items()]


def _checked_then_added() -> AbstractContextManager[object]:
    return mock.patch.object(Budget, "room", property(lambda budget: budget.usd - budget.spent))


def _settlements_lost() -> AbstractContextManager[object]:
    async def forgetful(*args: Any, **more: Any) -> Budget | None:
        found = await money.stored_budget(*args, **more)
        return None if found is None else replace(found, spent=0.0, spent_by={}, reserved={})

    return mock.patch.object(resume, "stored_budget", forgetful)


def _never_released() -> AbstractContextManager[object]:
    settle = Budget.settle

    def keep(self: Budget, task_id: str, *args: Any, **more: Any) -> None:
        held = self.reserved.get(task_id, 0.0)
        settle(self, task_id, *args, **more)
        self.reserved[task_id] = held

    return mock.patch.object(Budget, "settle", keep)


def _not_stored() -> AbstractContextManager[object]:
    start = RunState.start

    def unmarked(self: RunState, *args: Any, reserved_usd: float | None = None, **more: Any) -> Any:
        return start(self, *args, **more)

    return mock.patch.object(RunState, "start", unmarked)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "checked, then added": _checked_then_added,
    "settlements lost at resume": _settlements_lost,
    "a reservation never released": _never_released,
    "a reservation not stored with its start": _not_stored,
}
"""What plants each bug in a process."""
CAMPAIGN = Campaign(
    method="money",
    unit="runs within a budget",
    runs=RUNS,
    tell=tell,
    bugs=BUGS,
    tried=40,
    figures=lambda told: {
        "calls": sum(one.calls for one in told),
        "raises": sum(one.raises for one in told),
        "runs that spent beyond their budget": sum(bool(one.violations) for one in told),
    },
)
run = CAMPAIGN.run


if __name__ == "__main__":
    sys.exit(CAMPAIGN.main(sys.argv[1:]))
