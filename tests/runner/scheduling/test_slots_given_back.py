"""A slot is given back exactly once, in whichever way its task leaves it: fewer would starve the rest, and more would
break the limit. Shown with one run, with two runs that share their slots, and with a limit of one backend.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, FailureMode, ParallelRunner, Retry, Task
from plait.backends import FunctionBackend, Reply, ask
from plait.backends.backend_protocol import ConversationRequest
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import Pause, SlotPool
from plait.statuses import TaskStatus
from tests.support.sharing import refuse

SLOTS = 2


class Pairs:
    """A backend whose tasks `fill` wait for each other in pairs: with fewer than two slots they wait for ever. Other
    tasks leave their slots in the way that their prompts name. `most` is the number of tasks at work at once.
    """

    session_id = None

    def __init__(self) -> None:
        self.now = self.most = 0
        self.calls: Counter[str] = Counter()
        self._pair = asyncio.Barrier(SLOTS)

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Pairs]:
        yield self

    async def send(self, prompt: str) -> Reply:
        self.now += 1
        self.most = max(self.most, self.now)
        self.calls[prompt] += 1
        try:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            return await self._answer(*prompt.split())
        finally:
            self.now -= 1

    async def _answer(self, how: str, number: str = "") -> Reply:
        again = self.calls[f"{how} {number}"] > 1
        match how:
            case "fill":
                await self._pair.wait()
            case "fails":
                raise BackendError(ErrorKind.REFUSED, "no")
            case "retries" if not again:
                raise BackendError(ErrorKind.TRANSIENT, "later")
            case "hangs":
                await anyio.sleep_forever()
            case "asks":
                return Reply("which?", question=Question("which?"))
            case _:
                pass
        return Reply(how)


async def code_asks(prompt: str) -> str:
    return str(await ask("which?"))


WAYS: dict[str, dict[str, Any]] = {
    "completes": {},
    "fails": {"failure_mode": FailureMode.SOFT},
    "skips": {"prompt": "fails", "failure_mode": FailureMode.SKIP},
    "retries": {"retry": Retry(base_delay=0)},
    "hangs": {"timeout": 0.01, "retry": 0, "failure_mode": FailureMode.SOFT},
    "asks": {},
    "code asks": {"backend": "code"},
}


def dag_of(way: str, *, waits: bool) -> DAG:
    """Three tasks that leave their slots in this `way`, then four pairs; with `waits` the pairs wait for the three."""
    options = {"prompt": way, **WAYS[way]}
    prompt = options.pop("prompt")
    first = [Task(f"t{n}", f"{prompt} {n}", weight=9, **options) for n in range(3)]
    needed = [task.id for task in first] if waits else []
    return DAG([*first, *(Task(f"fill{n}", f"fill {n}", depends_on=needed) for n in range(4 * SLOTS))])


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_a_slot_comes_back_once(way: str, answered: bool) -> None:
    pairs = Pairs()
    runner = ParallelRunner(
        backends={"pairs": pairs, "code": FunctionBackend(code_asks)},
        default="pairs",
        store=MemoryStore(),
        concurrency=SLOTS,
        on_question=None if not answered else _answer,
    )
    with anyio.fail_after(60):
        result = await runner.run(dag_of(way, waits=answered or "ask" not in way))
    assert {result[f"fill{n}"].status for n in range(4 * SLOTS)} == {TaskStatus.COMPLETED}
    assert pairs.most == SLOTS


async def _answer(_question: object) -> str:
    return "this"


@pytest.mark.parametrize("limited", ["run", "backend"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_slot_of_two_runs_comes_back_once(way: str, limited: str) -> None:
    pairs = Pairs()
    runner = ParallelRunner(
        backends={"pairs": pairs, "code": FunctionBackend(code_asks)},
        default="pairs",
        store=MemoryStore(),
        concurrency=SLOTS if limited == "run" else 9,
        limits={"pairs": SLOTS},
        shared_limits=True,
    )
    runs = [dag_of(way, waits=False), DAG(Task(f"fill{n}", f"fill {n}") for n in range(4 * SLOTS))]
    found: list[TaskStatus] = []

    async def run(dag: DAG) -> None:
        result = await runner.run(dag)
        found.extend(result[f"fill{n}"].status for n in range(4 * SLOTS))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for dag in runs:
                group.start_soon(run, dag)
    assert set(found) == {TaskStatus.COMPLETED}
    assert pairs.most == SLOTS


LEAVES: dict[str, Callable[[Scheduler, int], None]] = {
    "completion": lambda one, at: one.finish(at, TaskStatus.COMPLETED),
    "failure": lambda one, at: one.finish(at, TaskStatus.FAILED),
    "cancellation": lambda one, at: one.finish(at, TaskStatus.CANCELLED),
    "question": lambda one, at: one.park(at),
    "retry": lambda one, at: one.set_aside(at),
    "refusal by a limit": lambda one, at: refuse(one, at, Pause(at_once=True)),
    "end of the run": lambda one, _: one.release_all(),
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("way", LEAVES)
def test_each_way_to_leave_a_slot_frees_one_of_the_pool(way: str, held: bool) -> None:
    """`held`: the slots were taken by an earlier process, and handed over."""
    pool = SlotPool(3, {"deep": 2}, shared=True)
    statuses = [TaskStatus.RUNNING if held else TaskStatus.PENDING, *[TaskStatus.PENDING] * 3]
    mine = Scheduler(
        DAG([Task("a", backend="deep"), *(Task(f"b{n}", "x") for n in range(3))]),
        ["deep", *["wide"] * 3],
        pool,
        statuses=statuses,
        held=[0] if held else [],
    )
    other = Scheduler(DAG(Task(f"o{n}", "x") for n in range(9)), ["wide"] * 9, pool)
    if not held:
        assert mine.take() == 0
    assert (pool.slots("deep").taken, pool.taken) == (1, 1)
    assert [other.take() is None for _ in range(3)] == [False, False, True]
    LEAVES[way](mine, 0)
    assert (pool.slots("deep").taken, pool.taken) == (0, 2)
    assert [other.take() is None for _ in range(2)] == [False, True]
    assert pool.taken == 3
