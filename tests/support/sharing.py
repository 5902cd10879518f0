"""Runs that share the limits of one runner."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import Pause

UNKNOWN = Pause()


def wide(name: str, count: int, backend: str | None = None) -> DAG:
    return DAG(Task(f"{name}{number}", prompt=name, backend=backend) for number in range(count))


def chain(name: str, count: int) -> DAG:
    return DAG(
        Task(f"{name}{number}", prompt=name, depends_on=[f"{name}{number - 1}"] if number else [])
        for number in range(count)
    )


def refuse(plan: Scheduler, position: int, pause: Pause = UNKNOWN) -> None:
    """Let the backend refuse the call of the started task, which is set aside."""
    plan.throttle(position, pause)
    plan.set_aside(position)


def bring_back(plan: Scheduler, position: int) -> None:
    """Let the wait of the refused task end, and the pause of its backend, if there is one."""
    for closing in [one for one in plan.closings if one[1] == position]:
        plan.closings.remove(closing)
        plan.reopen(closing[0], position)
    plan.requeue(position)


class Meter:
    """A backend that counts how many of its calls are under way, at most, and notes their order."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.order: list[str] = []

    async def __call__(self, prompt: str) -> str:
        self.order.append(prompt)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
        finally:
            self.now -= 1
        return prompt


async def run_all(runner: ParallelRunner, dags: Sequence[DAG]) -> list[RunStatus]:
    found: dict[int, RunStatus] = {}

    async def run(number: int, dag: DAG) -> None:
        found[number] = (await runner.run(dag)).status

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number, dag in enumerate(dags):
                group.start_soon(run, number, dag)
    return [found[number] for number in range(len(dags))]


COMPLETED = RunStatus.COMPLETED
