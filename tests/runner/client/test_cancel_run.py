"""A run is cancelled by another process while its owner runs it: the note comes at every awkward moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait import events as ev
from plait.errors import BackendError, ErrorKind, StoreError
from plait.events import RunEnded, TaskCompleted, TaskFailed, TaskStarted
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from tests.support.fakes import Talker
from tests.support.stores.faulty_store import Fault, on_write
from tests.support.stores.held import GRACE, HeldClock, HeldStore

CHAIN = DAG([Task("a", prompt="a"), Task("b", prompt="b", depends_on=["a"]), Task("c", prompt="c", depends_on=["b"])])


class Gate:
    """A backend that answers at once, but for the prompt `b`: that is answered when `open` is set."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.reached, self.open = anyio.Event(), anyio.Event()

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if prompt == "b":
            self.reached.set()
            await self.open.wait()
        return f"<{prompt}>"


class Scene:
    """A runner on held moments, and another one for the same store, as in another process."""

    def __init__(self, store: Store, backend: object = None, held: HeldStore | None = None) -> None:
        self.store, self.clock, self.limiter = store, HeldClock(), Gate()
        self.held = held or HeldStore(store)
        self.runner = ParallelRunner(backend or self.limiter, store=self.held, clock=self.clock, cancel_grace=GRACE)  # type: ignore[arg-type]
        self.other = ParallelRunner(Talker(), store=store)

    async def cancel(self) -> None:
        """Cancel from elsewhere, and have the owner look."""
        assert await self.other.runs.cancel("r") is RunStatus.CANCELLING
        self.held.looked = anyio.Event()
        self.clock.look()

    async def stored(self) -> tuple[str, dict[str, str]]:
        record = await self.store.get_run("r")
        assert record is not None
        return record.status, {task.task_id: task.status for task in await self.store.list_tasks("r")}


async def test_what_is_under_way_may_come_to_its_end_and_nothing_more_starts(store: Store) -> None:
    scene = Scene(store)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        async for event in run.events():  # told, so it is stored
            if isinstance(event, ev.RunCancelling):
                break
        assert await scene.stored() == ("cancelling", {"a": "completed", "b": "running", "c": "pending"})
        assert await scene.other.runs.cancel("r") is RunStatus.CANCELLING
        scene.limiter.open.set()
        result = await run.result()
    assert (result.status, scene.limiter.prompts) == (RunStatus.CANCELLED, ["a", "b"])
    assert result.text == {"a": "<a>", "b": "<b>"}
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "completed", "c": "cancelled"})
    assert len(await store.list_notes("r")) == 1, "one note is enough"
    kinds = [event.kind for event in await store.list_events("r")]
    assert kinds[-4:] == ["run_cancelling", "task_completed", "task_cancelled", "run_cancelled"]
    before = await store.get_run("r")
    assert await scene.other.runs.cancel("r") is RunStatus.CANCELLED
    assert await store.get_run("r") == before


async def test_when_the_grace_time_is_over_it_is_ended(store: Store) -> None:
    scene = Scene(store)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        scene.clock.grace_over.set()
        seen = [event.kind async for event in run.events()]
        result = await run.result()
    assert (result.status, result["b"].status) == (RunStatus.CANCELLED, TaskStatus.CANCELLED)
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "cancelled", "c": "cancelled"})
    assert [attempt.status for attempt in await store.list_attempts("r", "b")] == ["cancelled"]
    assert seen[-4:] == ["run_cancelling", "task_cancelled", "task_cancelled", "run_cancelled"]
    record = await store.get_run("r")
    assert record is not None and record.owner is None


async def test_even_the_last_task_may_finish_and_the_run_is_cancelled_all_the_same(store: Store) -> None:
    scene = Scene(store)
    async with scene.runner.start(DAG([Task("b", prompt="b")]), "r") as run:
        await scene.limiter.reached.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        scene.limiter.open.set()
        result = await run.result()
    assert (result.status, result.text) == (RunStatus.CANCELLED, {"b": "<b>"})
    assert await scene.stored() == ("cancelled", {"b": "completed"})


@pytest.mark.parametrize("task", ["a", "b"])
async def test_a_start_that_is_being_written_down_calls_nobody(store: Store, task: str) -> None:
    """Before the very first task, and before a later one, whose start is stored with the completion of the first."""
    held = HeldStore(store, lambda changes: any(isinstance(c, TaskStarted) and c.task_id == task for c in changes))
    scene = Scene(store, held=held)
    async with scene.runner.start(CHAIN, "r") as run:
        await held.holding.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        held.let_go.set()
        result = await run.result()
    assert (result.status, scene.limiter.prompts) == (RunStatus.CANCELLED, ["a"] if task == "b" else [])
    status, tasks = await scene.stored()
    assert (status, tasks["c"], tasks[task]) == ("cancelled", "cancelled", "cancelled")


async def test_no_such_start_goes_on_beside_what_is_under_way(store: Store) -> None:
    held = HeldStore(store, lambda changes: any(isinstance(c, TaskStarted) and c.task_id == "x" for c in changes))
    scene = Scene(store, held=held)
    dag = DAG([Task("b", prompt="b"), Task("a", prompt="a"), Task("x", prompt="x", depends_on=["a"])])
    async with scene.runner.start(dag, "r") as run:
        await held.holding.wait()
        await scene.limiter.reached.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        held.let_go.set()
        async for event in run.events():
            if isinstance(event, ev.RunCancelling):  # told with or after the start that was held
                break
        await anyio.wait_all_tasks_blocked()
        scene.limiter.open.set()
        result = await run.result()
    assert (result.status, sorted(scene.limiter.prompts)) == (RunStatus.CANCELLED, ["a", "b"])
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "completed", "x": "cancelled"})


@pytest.mark.parametrize("fails", [False, True])
async def test_a_note_that_comes_at_the_very_end_changes_nothing_then_or_later(store: Store, *, fails: bool) -> None:
    held = HeldStore(store, lambda changes: any(isinstance(c, TaskFailed | TaskCompleted) for c in changes))
    backend = Talker(lambda p, _: BackendError(ErrorKind.AUTH, "no key") if fails else p)
    scene = Scene(store, backend, held)
    async with scene.runner.start(DAG([Task("a", prompt="b")]), "r") as run:
        await held.holding.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        held.let_go.set()
        result = await run.result()
    assert result.status is (RunStatus.FAILED if fails else RunStatus.COMPLETED)
    assert await scene.other.runs.cancel("r") is result.status
    if fails:  # the note is void: it must not cancel the run that a person reopens
        again = Scene(store)
        async with again.runner.start_resume("r", retry_failed=True) as run:
            await again.limiter.reached.wait()
            for _ in range(2):  # the second look shows that the first one came to nothing
                again.held.looked = anyio.Event()
                again.clock.look()
                await again.held.looked.wait()
            again.limiter.open.set()
            assert (await run.result()).status is RunStatus.COMPLETED
        assert not again.clock.in_grace.is_set()


@pytest.mark.parametrize("left", ["interrupted", "waiting"])
async def test_nothing_follows_an_owners_leaving(left: str) -> None:
    """The request is noticed in the very step in which the owner has left a run that has not ended."""
    store = MemoryStore()
    dag = DAG([Task("b", prompt="b", at_most_once=left == "waiting")])
    scope = anyio.CancelScope()

    class Noticing(HeldStore):
        async def write(self, batch: Batch) -> None:
            await super().write(batch)
            if isinstance(batch.events[-1], RunEnded):
                run._control.cancel()

    scene = Scene(store, held=Noticing(store))
    with scope:
        async with scene.runner.start(dag, "r") as run:
            await scene.limiter.reached.wait()
            scope.cancel()
    if left == "waiting":
        async with scene.runner.start_resume("r") as run:
            assert (await run.result()).status is RunStatus.WAITING_INPUT
    record = await store.get_run("r")
    assert record is not None
    assert (record.status, record.owner) == ("waiting_input" if left == "waiting" else "running", None)


async def test_waiting_for_it(store: Store) -> None:
    scene = Scene(store)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.runner.run, CHAIN, "r")
        await scene.limiter.reached.wait()
        scene.clock.grace_over.set()
        group.start_soon(_look_when_told, scene)
        assert await scene.other.runs.cancel("r", wait=30.0) is RunStatus.CANCELLED


async def _look_when_told(scene: Scene) -> None:
    while not await scene.store.list_notes("r"):
        await anyio.lowlevel.checkpoint()
    scene.clock.look()


async def test_a_retry_is_not_waited_for(store: Store) -> None:
    waits = Talker(lambda _p, _o: BackendError(ErrorKind.RATE_LIMITED, "later", retry_after=3600.0))
    scene = Scene(store, waits)
    async with scene.runner.start(DAG([Task("a", prompt="a", retry=Retry(3))]), "r") as run:
        async for event in run.events():
            if isinstance(event, ev.TaskRetried):
                await scene.cancel()
    assert (await run.result()).status is RunStatus.CANCELLED
    assert (waits.prompts, await scene.stored()) == (["a"], ("cancelled", {"a": "cancelled"}))


@pytest.mark.parametrize("how", ["stop", "native"])
async def test_whatever_ends_the_grace_time_early_the_run_is_cancelled(store: Store, how: str) -> None:
    scene = Scene(store)
    scope = anyio.CancelScope()
    with scope:
        async with scene.runner.start(CHAIN, "r") as run:
            await scene.limiter.reached.wait()
            await scene.cancel()
            await scene.clock.in_grace.wait()
            {"stop": run.stop, "native": scope.cancel}[how]()
            await run.result()
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "cancelled", "c": "cancelled"})


async def test_a_run_that_was_told_to_stop_first_stops(store: Store) -> None:
    scene = Scene(store)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        assert await scene.other.runs.cancel("r") is RunStatus.CANCELLING
        run.stop()
        assert (await run.result()).status is RunStatus.INTERRUPTED
    backend = Talker()
    resumed = await ParallelRunner(backend, store=store).resume("r")  # nobody had taken notice of the note
    assert (resumed.status, backend.prompts) == (RunStatus.CANCELLED, [])


async def test_an_inbox_that_cannot_be_read_ends_no_run() -> None:
    class Unreadable(HeldStore):
        fails = True

        async def list_notes(self, run_id: str, after: int = 0):
            notes = await super().list_notes(run_id, after)
            if self.fails:
                raise StoreError("planted")
            return notes

    held = Unreadable(MemoryStore())
    scene = Scene(held.inner, held=held)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        for _ in range(2):
            await scene.cancel()
            await held.looked.wait()
        held.fails = False
        scene.clock.look()
        await scene.clock.in_grace.wait()
        scene.limiter.open.set()
        result = await run.result()
    assert (result.status, result.degraded) == (RunStatus.CANCELLED, ())


async def test_a_store_that_is_away_when_the_cancel_comes_catches_up() -> None:
    inner = MemoryStore()
    scene = Scene(inner)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        assert await scene.other.runs.cancel("r") is RunStatus.CANCELLING
        first = scene.held.writes
        # The write that says `cancelling` fails.
        scene.held.faults = on_write(lambda n: Fault.BEFORE if n <= first + 1 else None)
        scene.clock.look()
        await scene.clock.in_grace.wait()
        scene.limiter.open.set()
        result = await run.result()
    assert (result.status, result.text) == (RunStatus.CANCELLED, {"a": "<a>", "b": "<b>"})
    assert [one.lost for one in result.degraded] == [0] and result.degraded[0].until is not None
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "completed", "c": "cancelled"})


async def test_a_cancel_from_the_owners_own_process_is_seen_at_once() -> None:
    """No look into the inbox is due: the clock of the owner allows none."""
    scene = Scene(MemoryStore())
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        assert await scene.other.runs.cancel("r") is RunStatus.CANCELLING
        with anyio.fail_after(60):
            await scene.clock.in_grace.wait()
        scene.limiter.open.set()
        assert (await run.result()).status is RunStatus.CANCELLED


async def test_so_is_a_cancel_from_another_thread(tmp_path: Path) -> None:
    async def elsewhere() -> RunStatus:
        async with SQLiteStore(tmp_path / "runs.db") as store:
            return await ParallelRunner(Talker(), store=store).runs.cancel("r", wait=20.0)

    async with SQLiteStore(tmp_path / "runs.db") as store:
        scene = Scene(store)
        scene.clock.grace_over.set()
        async with scene.runner.start(CHAIN, "r") as run:
            await scene.limiter.reached.wait()
            assert await anyio.to_thread.run_sync(asyncio.run, elsewhere()) is RunStatus.CANCELLED
            assert (await run.result()).status is RunStatus.CANCELLED
