"""Attempts before a crash count after it: each limit of a task holds over all of its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task
from plait.errors import BackendError, ErrorKind
from plait.persistence import Store
from tests.support.crashed import Dying, die
from tests.support.fakes import Talker

ALWAYS = DAG([Task("a", "a", retry=Retry(3, base_delay=0.0))])


class Failing:
    """Fails every time; calls `at_last` in the call of that number."""

    def __init__(self, last: int = 0, at_last: Callable[[], None] | None = None) -> None:
        self.calls = 0
        self._last = last
        self._at_last = at_last

    async def __call__(self, _prompt: str) -> str:
        self.calls += 1
        if self.calls == self._last and self._at_last is not None:
            self._at_last()
            await anyio.sleep_forever()
        raise BackendError(ErrorKind.TRANSIENT, "no")


@pytest.mark.parametrize("failed", [1, 2])
async def test_tries_before_a_crash_count_after_it(store: Store, failed: int) -> None:
    """Each resume gave a failing task all its tries: kills-1000-events.published:6-txn.after_commit:3."""

    def stop() -> None:
        run.stop()

    backend = Failing(failed + 1, stop)
    async with ParallelRunner(backend, store=store).start(ALWAYS, "r") as run:
        assert (await run.result()).status is RunStatus.INTERRUPTED
    assert (await ParallelRunner(backend, store=store).resume("r")).status is RunStatus.FAILED
    attempts = [one.status for one in await store.list_attempts("r", "a")]
    assert attempts == [*["retried"] * failed, "interrupted", *["retried"] * (2 - failed), "failed"]
    assert backend.calls == len(attempts)


async def test_a_person_who_asks_for_failed_tasks_gives_them_all_their_tries(store: Store) -> None:
    await ParallelRunner(Failing(), store=store).run(ALWAYS, "r")
    backend = Failing()
    await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert backend.calls == 3
    assert (await ParallelRunner(Talker(), store=store).resume("r", retry_failed=True)).status is RunStatus.COMPLETED


async def test_each_task_has_its_own_tries_after_a_crash(store: Store) -> None:
    dag = DAG([Task(name, name, retry=Retry(3, base_delay=0.0)) for name in ("a", "b")])
    broken = BackendError(ErrorKind.TRANSIENT, "no")
    calls = Counter[str]()

    def failing(*names: str) -> Talker:
        def answer(prompt: str, _: object) -> str | BackendError:
            calls[prompt] += 1
            return broken if prompt in names else prompt

        return Talker(answer)

    await die(store, Dying(lambda prompt: prompt == "b" or calls["a"] == 2, answer=failing("a")), dag)
    assert [task.attempt for task in await store.list_tasks("r")] == [3, 1]
    result = await ParallelRunner(failing("a", "b"), store=store).resume("r")
    # One try of `a` and three tries of `b` are left. The attempts that the crash cut are no tries.
    assert (calls, [result[name].attempts for name in ("a", "b")]) == ({"a": 3, "b": 3}, [4, 4])
