"""What the kills found, each as the shortest story that shows it."""

from __future__ import annotations

from collections import Counter

import pytest

from backends import BackendError, ErrorKind
from persistence import Store
from runner import DAG, ParallelRunner, Retry, RunStatus, Task
from tests.support.fakes import Talker

ALWAYS = DAG([Task("a", "a", retry=Retry(3, base_delay=0.0))])


class Failing:
    """Fails every time."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, _prompt: str) -> str:
        self.calls += 1
        raise BackendError(ErrorKind.TRANSIENT, "no")


@pytest.mark.parametrize("before", [1, 2])
async def test_tries_before_a_crash_count_after_it(store: Store, before: int) -> None:
    """`plait crashtest --case kills-1000-told:6-txn.after_commit:3`: each resume gave a failing task all its tries."""
    backend = Failing()
    runner = ParallelRunner(backend, store=store)
    async with runner.start(ALWAYS, "r") as run:
        async for event in run.events():
            if event.kind == "task_retrying" and backend.calls == before:
                run.stop()
    left = backend.calls
    result = await runner.resume("r")
    assert result.status is RunStatus.FAILED
    attempts = Counter(one.status for one in await store.list_attempts("r", "a"))
    assert (attempts["retried"], attempts["failed"]) == (2, 1)
    # An attempt may be interrupted after its backend was called, or before.
    assert 3 <= backend.calls <= 3 + attempts["interrupted"], f"{left} before"


async def test_a_person_who_asks_for_failed_tasks_gives_them_all_their_tries(store: Store) -> None:
    await ParallelRunner(Failing(), store=store).run(ALWAYS, "r")
    backend = Failing()
    await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert backend.calls == 3
    assert (await ParallelRunner(Talker(), store=store).resume("r", retry_failed=True)).status is RunStatus.COMPLETED
