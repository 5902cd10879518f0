"""A run is paused and tuned while it goes on, by another process: notes that its owner reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, Retry, Run, RunStatus, Task
from plait.errors import BackendError, ErrorKind, InvalidRequest, RunNotFound, RunNotResumable
from plait.events import RunTuned, TaskCompleted, TaskFailed, TaskRetried, TaskStarted
from plait.persistence import Note, Store
from plait.results import WaitKind
from plait.runner.domain.run_tuning import MOST_SLOTS, RETRY, TUNE
from tests.support.fakes import Talker
from tests.support.stores.held import HeldClock


class Calls:
    """A backend whose calls end when `end` says so."""

    def __init__(self) -> None:
        self.under_way: dict[str, anyio.Event] = {}
        self.most = 0
        self._changed = anyio.Event()

    async def __call__(self, prompt: str) -> str:
        self.under_way[prompt] = ended = anyio.Event()
        self.most = max(self.most, len(self.under_way))
        self._note()
        await ended.wait()
        del self.under_way[prompt]
        self._note()
        return prompt

    def _note(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def end(self, *prompts: str) -> None:
        """End the calls, all if none is named, and wait for their ends."""
        ended = {prompt: self.under_way[prompt] for prompt in prompts or tuple(self.under_way)}
        for one in ended.values():
            one.set()
        while any(self.under_way.get(prompt) is one for prompt, one in ended.items()):
            await self._changed.wait()

    async def reach(self, count: int) -> None:
        """Wait until `count` calls are under way."""
        while len(self.under_way) != count:
            await self._changed.wait()


def rows(count: int, *backends: str) -> DAG:
    names = [(backend, f"{backend}{row}") for backend in backends for row in range(count)]
    return DAG(Task(name, prompt=name, backend=backend) for backend, name in names)


class Scene:
    """Runs on held moments, tuned from another runner on the same store."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.store, self.clock, self.calls = store, HeldClock(), Calls()
        backends = {"a": self.calls, "b": self.calls}
        self.runner = ParallelRunner(backends=backends, default="a", store=store, clock=self.clock, **options)
        self.runs = ParallelRunner(Talker(), store=store).runs

    async def wait_for(self, run: Run, fits: Callable[[object], bool]) -> None:
        """Have the owner look into its inbox, and wait for an event that is told."""
        self.clock.look()
        async for event in run.events():
            if fits(event):
                return

    async def tuned(self, run: Run) -> None:
        await self.wait_for(run, lambda event: isinstance(event, RunTuned))

    async def told(self) -> list[str]:
        return [event.kind for event in await self.store.list_events("r") if event.kind == RunTuned.kind]

    async def waits(self, task_id: str) -> tuple[WaitKind, str]:
        reason = (await self.runs.get("r")).tasks[task_id].waits
        assert reason is not None
        return reason.kind, reason.text


async def test_a_paused_run_starts_nothing_more_and_ends_no_call(store: Store) -> None:
    scene = Scene(store, concurrency=2)
    async with scene.runner.start(rows(4, "a"), "r") as run:
        await scene.calls.reach(2)
        assert await scene.runs.pause("r")
        await scene.tuned(run)
        await scene.calls.end()
        async for event in run.events():
            if isinstance(event, TaskCompleted) and event.task_id == "a1":
                break
        kind, text = await scene.waits("a2")
        assert kind is WaitKind.PAUSED
        assert text.startswith("the run is paused since ")
        assert not scene.calls.under_way
        assert await scene.runs.pause("r", off=True)
        await scene.tuned(run)
        await scene.calls.reach(2)
        await scene.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert len(await scene.told()) == 2


async def test_a_paused_backend_leaves_the_other_one_alone(store: Store) -> None:
    scene = Scene(store, concurrency=2)
    async with scene.runner.start(rows(3, "a", "b"), "r") as run:
        await scene.calls.reach(2)
        await scene.runs.pause("r", backend="a")
        await scene.tuned(run)
        for left in (2, 1, 0):
            await scene.calls.end()
            await scene.calls.reach(left)
        kind, text = await scene.waits("a2")
        assert (kind, text.partition(" since ")[0]) == (WaitKind.PAUSED, "a is paused")
        await scene.runs.pause("r", backend="a", off=True)
        await scene.tuned(run)
        await scene.calls.reach(1)
        await scene.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_a_pause_holds_over_a_resume(store: Store) -> None:
    first = Scene(store, concurrency=2)
    async with first.runner.start(rows(4, "a"), "r") as run:
        await first.calls.reach(2)
        run.stop()
    assert not await first.runs.pause("r"), "nobody works on it"
    second = Scene(store, concurrency=2)
    async with second.runner.start_resume("r") as run:
        await second.runs.tune("r", concurrency=3)
        second.clock.look()
        started = False
        async for event in run.events():
            started = started or isinstance(event, TaskStarted)
            if isinstance(event, RunTuned) and event.slots == 3:
                break
        assert not started, "not even before the owner looks into its inbox"
        run.stop()
    third = Scene(store, concurrency=2)
    async with third.runner.start_resume("r") as run:
        assert not third.calls.under_way
        await third.runs.pause("r", off=True)
        third.clock.look()
        await third.calls.reach(3)
        await third.calls.end()
        await third.calls.reach(1)
        await third.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert len(await first.told()) == 3, "a change is told once"


async def test_a_run_is_made_wider_and_narrower(store: Store) -> None:
    scene = Scene(store, concurrency=2)
    async with scene.runner.start(rows(12, "a"), "r") as run:
        await scene.calls.reach(2)
        await scene.runs.tune("r", concurrency=5)
        await scene.tuned(run)
        await scene.calls.reach(5)
        await scene.runs.tune("r", limits={"a": 1})
        await scene.tuned(run)
        assert await scene.waits("a11") == (WaitKind.SLOT, "no free slot (5 of 5)")
        await scene.calls.end()
        for _ in range(7):
            await scene.calls.reach(1)
            await scene.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert scene.calls.most == 5


async def test_a_number_of_a_backend_widens_the_run(store: Store) -> None:
    scene = Scene(store, limits={"a": 2}, concurrency=2)
    async with scene.runner.start(rows(8, "a"), "r") as run:
        await scene.calls.reach(2)
        await scene.runs.tune("r", limits={"a": 6})
        await scene.tuned(run)
        await scene.calls.reach(6)
        await scene.calls.end()
        await scene.calls.reach(2)
        await scene.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_a_run_on_shared_slots_is_narrowed_alone(store: Store) -> None:
    scene = Scene(store, concurrency=4, shared_limits=True)
    async with scene.runner.start(rows(6, "a"), "r") as run:
        await scene.calls.reach(4)
        await scene.runs.tune("r", concurrency=1)
        await scene.tuned(run)
        await scene.calls.end("a0", "a1", "a2")
        await scene.calls.reach(1)
        async with scene.runner.start(rows(3, "b"), "other") as other:
            await scene.calls.reach(4)
            assert [name for name in scene.calls.under_way if name.startswith("a")] == ["a3"]
            await scene.calls.end("b0", "b1", "b2")
            await other.result()
        for _ in range(3):
            await scene.calls.reach(1)
            await scene.calls.end()
            await scene.calls.reach(0)
            await anyio.lowlevel.checkpoint()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_what_cannot_be_done_is_said(store: Store) -> None:
    scene = Scene(store)
    with pytest.raises(RunNotFound):
        await scene.runs.pause("r")
    async with scene.runner.start(rows(1, "a"), "r") as run:
        await scene.calls.reach(1)
        with pytest.raises(InvalidRequest, match=r"run r has no backend 'aa'.*did you mean"):
            await scene.runs.pause("r", backend="aa")
        with pytest.raises(InvalidRequest, match="1 to 10,000, not 0"):
            await scene.runs.tune("r", concurrency=0)
        with pytest.raises(InvalidRequest, match="say how many"):
            await scene.runs.tune("r")
        await scene.calls.end()
        await run.result()
    with pytest.raises(RunNotResumable, match="run r is completed"):
        await scene.runs.pause("r")
    assert await scene.told() == []


WRONG = [
    "",
    "[]",
    "{}",
    '{"backend": null, "paused": null, "slots": null}',
    '{"backend": null, "paused": true, "slots": 3}',
    '{"backend": 3, "paused": true, "slots": null}',
    '{"backend": null, "paused": 1, "slots": null}',
    '{"backend": null, "paused": null, "slots": true}',
    f'{{"backend": null, "paused": null, "slots": {MOST_SLOTS + 1}}}',
]


async def test_a_note_that_says_nothing_changes_nothing(store: Store) -> None:
    """Any process with access to the store can send notes."""
    scene = Scene(store, concurrency=1)
    async with scene.runner.start(rows(3, "a"), "r") as run:
        await scene.calls.reach(1)
        for body in WRONG:
            await store.send("r", Note(TUNE, "2026-01-01T00:00:00.000Z", body=body))
        await scene.runs.tune("r", concurrency=2)
        await scene.tuned(run)
        await scene.calls.reach(2)
        await scene.calls.end()
        async for event in run.events():
            if isinstance(event, TaskStarted) and event.task_id == "a2":
                break
        await scene.calls.reach(1)
        await scene.calls.end()
        assert (await run.result()).status is RunStatus.COMPLETED
    assert len(await scene.told()) == 1


class Failing(Calls):
    """The calls for `bad` fail until `mended`."""

    def __init__(self, error: BackendError) -> None:
        super().__init__()
        self.error, self.mended, self.tries = error, False, 0
        self.ends_at_once = False

    async def __call__(self, prompt: str) -> str:
        if prompt == "bad":
            self.tries += 1
            if not self.mended:
                raise self.error
            return "good"
        return prompt if self.ends_at_once else await super().__call__(prompt)


WORK = [Task("bad", prompt="bad"), Task("after", prompt="after {{ bad }}", depends_on=["bad"]), Task("b", prompt="b")]


async def test_a_failed_task_runs_again_while_the_others_go_on(store: Store) -> None:
    scene = Scene(store)
    calls = Failing(BackendError(ErrorKind.INVALID_REQUEST, "bad"))
    runner = ParallelRunner(calls, store=store, clock=scene.clock)
    async with runner.start(DAG(WORK), "r") as run:
        await calls.reach(1)
        await scene.wait_for(run, lambda event: isinstance(event, TaskFailed))
        with pytest.raises(InvalidRequest, match="'after' of run r cannot run again now: it has not begun"):
            await scene.runs.retry("r", "after")
        with pytest.raises(InvalidRequest, match="'b' of run r cannot run again now: it is running"):
            await scene.runs.retry("r", "b")
        calls.mended = True
        await scene.runs.retry("r", "bad")
        await scene.runs.retry("r", "bad")  # void once the first has begun
        scene.clock.look()
        await calls.reach(2)
        assert set(calls.under_way) == {"b", "after good"}
        await calls.end()
        result = await run.result()
    assert (result.status, calls.tries, result["bad"].attempts) == (RunStatus.COMPLETED, 2, 2)
    told = [event.kind for event in await store.list_events("r") if event.task_id == "bad"]
    assert told == ["task_started", "task_failed", "task_reopened", "task_started", "task_completed"]


@pytest.mark.parametrize("kind", [ErrorKind.TRANSIENT, ErrorKind.RATE_LIMITED], ids=["a failure", "a pause"])
async def test_a_task_that_waits_for_its_next_attempt_runs_at_once(kind: ErrorKind, store: Store) -> None:
    scene = Scene(store)
    calls = Failing(BackendError(kind, "bad", retry_after=3600.0))
    runner = ParallelRunner(calls, store=store, clock=scene.clock)
    async with runner.start(DAG(WORK[:1]), "r") as run:
        await scene.wait_for(run, lambda event: isinstance(event, TaskRetried))
        calls.mended = True
        await scene.runs.retry("r", "bad")
        scene.clock.look()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_a_retried_task_has_all_its_attempts_again(store: Store) -> None:
    scene = Scene(store)
    calls = Failing(BackendError(ErrorKind.TRANSIENT, "bad", retry_after=0.0))
    runner = ParallelRunner(calls, store=store, clock=scene.clock)
    retry = Retry(attempts=2, base_delay=0.0, max_delay=0.0)
    async with runner.start(DAG([Task("bad", prompt="bad", retry=retry), Task("b", prompt="b")]), "r") as run:
        await calls.reach(1)
        await scene.wait_for(run, lambda event: isinstance(event, TaskFailed))
        await scene.runs.retry("r", "bad")
        await scene.wait_for(run, lambda event: isinstance(event, TaskFailed))
        await store.send("r", Note(RETRY, "2026-01-01T00:00:00.000Z", "bad", '{"attempt": 2}'))
        await scene.runs.tune("r", concurrency=3)
        await scene.tuned(run)
        calls.ends_at_once = True
        await calls.end()
        await run.result()
    assert calls.tries == 4, "a request for another attempt than the last one is void"


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ([Task("bad", prompt="bad", failure_mode="soft")], "have continued without it"),
        ([Task("bad", prompt="bad"), Task("any", prompt="x", depends_on=["bad", "b"], join="any")], "with `join`"),
    ],
)
async def test_a_task_without_which_others_went_on_stays_failed(store: Store, tasks: list[Task], why: str) -> None:
    scene = Scene(store)
    calls = Failing(BackendError(ErrorKind.INVALID_REQUEST, "bad"))
    runner = ParallelRunner(calls, store=store, clock=scene.clock)
    async with runner.start(DAG([*tasks, Task("b", prompt="b")]), "r") as run:
        await calls.reach(1)
        await scene.wait_for(run, lambda event: isinstance(event, TaskFailed))
        with pytest.raises(InvalidRequest, match=why):
            await scene.runs.retry("r", "bad")
        await store.send("r", Note(RETRY, "2026-01-01T00:00:00.000Z", "bad", '{"attempt": 1}'))  # from elsewhere
        await store.send("r", Note(RETRY, "2026-01-01T00:00:00.000Z", "nobody", '{"attempt": 1}'))
        await store.send("r", Note(RETRY, "2026-01-01T00:00:00.000Z", "b", "{}"))
        await scene.runs.tune("r", concurrency=3)
        await scene.tuned(run)
        calls.ends_at_once = True
        await calls.end()
        await run.result()
    assert calls.tries == 1


async def test_a_run_without_a_process_names_the_resume(store: Store) -> None:
    calls = Failing(BackendError(ErrorKind.INVALID_REQUEST, "bad"))
    assert (await ParallelRunner(calls, store=store).run(WORK[:2], "r")).status is RunStatus.FAILED
    with pytest.raises(InvalidRequest, match="plait resume r --retry-failed"):
        await ParallelRunner(calls, store=store).runs.retry("r", "bad")
