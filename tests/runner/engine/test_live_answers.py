"""Questions while the run lives: other branches, callbacks, deadlines, and what is left in the store meanwhile."""

from __future__ import annotations

import json

import anyio
import pytest

from plait import DAG, FailureMode, OpenQuestion, ParallelRunner, RunStatus, Task, TaskStatus
from plait import events as new_events
from plait.backends import ask
from plait.errors import AnswerConflict
from plait.persistence import Batch, MemoryStore, Note, Store
from plait.persistence.store_records import NoteRecord, TaskRecord
from plait.runner.engine.inbox import LOOK_EVERY_S
from tests.support.fakes import QuickClock
from tests.support.growth import tasks
from tests.support.late import HOLDING, LATE, Held, asking
from tests.support.seeded_loop import VirtualClock, run_seeded
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write


class Counting(MemoryStore):
    """Counts how often the tasks of a run are read."""

    reads = 0

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        self.reads += 1
        return await super().list_tasks(run_id, only)


async def test_who_waits_for_an_answer_to_be_taken_does_not_read_the_run_again_and_again() -> None:
    work, store = Held(), Counting()
    runner = ParallelRunner(work, store=store)
    async with runner.start(HOLDING) as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskWaiting):
                assert await runner.runs.answer(run.run_id, "a", "yes")  # after about LOOK_EVERY_S
                assert store.reads == 2
                work.release()
        assert (await run.result()).text["a"] == "yes"


async def test_a_late_answer_to_an_earlier_question_answers_no_later_one() -> None:
    async def work(_prompt: str) -> str:
        return f"{await ask('One?')} {await ask('Two?')}"

    async def wait(_question: OpenQuestion) -> None:
        await anyio.sleep_forever()

    store, asked = MemoryStore(), 0
    runner = ParallelRunner(work, store=store, on_question=wait)
    async with runner.start(DAG([Task("a", "x")]), "r") as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskWaiting):
                asked += 1
                stale = json.dumps({"attempt": 1, "value": "stale", "nonce": "2"})
                if asked == 2:  # read together with the answer, and before it
                    await store.send("r", Note("answer", event.at, "a", stale))
                assert await runner.runs.answer("r", "a", str(asked))
        assert (await run.result()).text == {"a": "1 2"}


async def test_others_go_on_while_one_waits(store: Store) -> None:
    work = Held()
    runner = ParallelRunner(work, store=store)
    async with runner.start(HOLDING) as run:
        seen: list[str] = []
        async for event in run.events():
            if isinstance(event, new_events.TaskWaiting):
                assert [one.question for one in await runner.runs.questions(run.run_id)] == ["Go?"]
                work.release()
            if isinstance(event, new_events.TaskCompleted):
                seen.append(event.task_id)
        result = await run.result()
    assert (sorted(seen), result.status, result["a"].question) == (["c", "hold"], RunStatus.WAITING_INPUT, "Go?")


@pytest.mark.parametrize(
    ("mode", "status", "b"),
    [("hard", "failed", None), ("soft", "failed", "so "), ("skip", "completed", "so ")],
)
async def test_nobody_answers_by_the_deadline(store: Store, mode: str, status: str, b: str | None) -> None:
    """Other work goes on meanwhile, so the deadline passes while the run lives."""
    work = Held(deadline=60)
    dag = DAG(
        [
            Task("a", "late", failure_mode=FailureMode(mode)),
            Task("b", "so {{ a }}", depends_on=["a"]),
            Task("h", "hold"),
        ]
    )
    async with ParallelRunner(work, store=store, clock=QuickClock()).start(dag) as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskFailed):
                work.release()
        result = await run.result()
    assert (result.status.value, result.text.get("b")) == (status, b)
    assert (result["a"].error_kind, result["a"].error) == ("timeout", "no answer by the deadline: Go?")
    assert (await store.list_tasks(result.run_id))[0].question is None


@pytest.mark.parametrize("deadline", [0, 60])
async def test_the_default_is_taken_at_the_deadline(store: Store, deadline: float) -> None:
    work = Held(default="later", deadline=deadline)
    async with ParallelRunner(work, store=store, clock=QuickClock()).start(HOLDING) as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskAnswered):
                work.release()
        result = await run.result()
    assert (result.status, result.text["a"]) == (RunStatus.COMPLETED, "later")


async def test_a_deadline_is_no_reason_to_stay(store: Store) -> None:
    """Neither when the question is asked, nor when a run is resumed that has nothing else to do."""
    runner = ParallelRunner(asking(default="later", deadline=3600), store=store)
    with anyio.fail_after(60):
        result = await runner.run(LATE)
        assert (await runner.resume(result.run_id)).status is RunStatus.WAITING_INPUT
    (asked,) = await runner.runs.questions(result.run_id)
    assert asked.asks is not None
    assert asked.asks.default == "later"


@pytest.mark.parametrize(
    "body",
    ['{"attempt":1,"value":"yes","nonce":"1"}', "{}", "[", '{"attempt":1e999,"value":1,"nonce":""}', "[" * 100_000],
)
@pytest.mark.parametrize("task_id", ["a", "nobody", None])
async def test_a_note_that_answers_nothing_harms_no_run(task_id: str | None, body: str) -> None:
    """Whoever may write to the store may send any note, and may send it too late."""
    store, clock = MemoryStore(), _LooksAtOnce()
    work = Held(deadline=0)  # it has failed before the note comes
    async with ParallelRunner(work, store=store, clock=clock).start(HOLDING) as run:
        async for event in run.events():
            if isinstance(event, new_events.TaskFailed):
                await store.send(run.run_id, Note("answer", "2026-01-01T00:00:00.000Z", task_id, body))
                with anyio.fail_after(60):
                    await clock.two_looks()
                work.release()
        result = await run.result()
    assert (result.status, result["a"].status, result.degraded) == (RunStatus.FAILED, TaskStatus.FAILED, ())


class _LooksAtOnce(QuickClock):
    """Looks into the inbox all the time."""

    def __init__(self) -> None:
        super().__init__()
        self._look = anyio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds != LOOK_EVERY_S:
            return await super().sleep(seconds)
        self._look.set()
        self._look = anyio.Event()
        return await anyio.sleep(0.001)

    async def two_looks(self) -> None:
        """Until a look has begun and ended from now on."""
        for _ in range(2):
            await self._look.wait()


async def test_a_question_asked_while_the_store_is_away_is_caught_up() -> None:
    away = True
    inner = MemoryStore()
    store = FaultyStore(inner, on_write(lambda number: Fault.BEFORE if away and number > 1 else None))
    work = Held()
    async with ParallelRunner(work, store=store, clock=QuickClock()).start(HOLDING) as run:
        async for event in run.events():
            if isinstance(event, new_events.StoreDegraded):
                away = False
                work.release()
        result = await run.result()
    assert (result.status, result.degraded[0].lost) == (
        RunStatus.WAITING_INPUT,
        0,
    )
    again = await ParallelRunner(work, store=inner).resume(run.run_id, answers={"a": "yes"})
    assert (again.status, again.text["a"]) == (RunStatus.COMPLETED, "yes")


async def test_a_run_without_a_store_waits_and_says_what_for() -> None:
    result = await ParallelRunner(asking()).run(LATE)
    assert (result.status, result["a"].question, result.text["c"]) == (RunStatus.WAITING_INPUT, "Go?", "beside")


class SlowStore(MemoryStore):
    """Takes `slow` virtual seconds for a write."""

    slow = 0.0

    async def write(self, batch: Batch) -> None:
        await anyio.sleep(self.slow)
        await super().write(batch)


def test_an_answer_that_comes_while_the_last_end_is_written_down_finds_a_worker() -> None:
    async def main() -> None:
        store, clock = SlowStore(), VirtualClock()

        async def answer(prompt: str) -> str:
            if prompt in {"q", "r"}:
                return f"got {await ask(f'{prompt}?')}"
            await clock.sleep(20)
            store.slow = 8.0
            return "b"

        async def on_question(question: OpenQuestion) -> None:
            await clock.sleep(22 if question.task_id == "q" else 24)

        runner = ParallelRunner(answer, store=store, clock=clock, on_question=on_question)
        async with runner.start(DAG(tasks("q", "r", "b")), "x") as run, anyio.create_task_group() as beside:
            await clock.sleep(25.5)  # both callbacks had nothing to say, and the end of b is being written
            other = ParallelRunner(store=store, clock=clock)
            beside.start_soon(other.runs.answer, "x", "q", "yes")
            beside.start_soon(other.runs.answer, "x", "r", "yes")
            result = await run.result()
        if result.status is RunStatus.WAITING_INPUT:  # the answers came too late for this process
            result = await runner.resume("x")
        assert result.text == {"q": "got yes", "r": "got yes", "b": "b"}

    for seed in range(5):
        run_seeded(main, seed)


class LateNotes(FaultyStore):
    """A note takes `late` virtual seconds to the store."""

    def __init__(self, inner: Store, late: float) -> None:
        super().__init__(inner)
        self._late = late

    async def send(self, run_id: str, note: Note) -> None:
        await anyio.sleep(self._late)
        await super().send(run_id, note)


class Unread(FaultyStore):
    """The owner of the run sees no note."""

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return ()


@pytest.mark.parametrize(("first", "late", "by"), [("yes", "yes please", "person"), (None, "yes", "default")])
def test_an_answer_that_arrives_after_another_one_is_refused(first: str | None, late: str, by: str) -> None:
    """Although the first answer begins as the late one does, or the default is the same."""

    async def main() -> None:
        store, clock, work = MemoryStore(), VirtualClock(), Held(default="yes", deadline=8)
        async with ParallelRunner(work, store=store, clock=clock).start(HOLDING, "x") as run:
            await clock.sleep(5)
            async with anyio.create_task_group() as beside:
                if first is not None:
                    beside.start_soon(ParallelRunner(store=store, clock=clock).runs.answer, "x", "a", first)
                with pytest.raises(AnswerConflict, match=f"was answered by {by}"):
                    await ParallelRunner(store=LateNotes(store, 8), clock=clock).runs.answer("x", "a", late)
            work.release()
            assert (await run.result()).text["a"] == "yes"

    run_seeded(main, 1)


def test_the_second_of_two_equal_answers_is_refused_before_the_owner_reads_them() -> None:
    async def main() -> None:
        store, clock, work = MemoryStore(), VirtualClock(), Held()
        async with ParallelRunner(work, store=Unread(store), clock=clock).start(HOLDING, "x") as run:
            await clock.sleep(5)
            async with anyio.create_task_group() as beside:
                beside.start_soon(ParallelRunner(store=store, clock=clock).runs.answer, "x", "a", "yes")
                with pytest.raises(AnswerConflict, match="has an earlier answer"):
                    await ParallelRunner(store=LateNotes(store, 2), clock=clock).runs.answer("x", "a", "yes")
            work.release()
            await run.result()

    run_seeded(main, 1)


def test_an_answer_is_reported_soon_and_the_run_is_read_again_once_whatever_else_happens() -> None:
    async def main() -> None:
        store, clock = Counting(), VirtualClock()

        class ReadLater(Unread):
            async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
                return await self.inner.list_notes(run_id, after) if clock.monotonic() > 9 else ()

        async def work(prompt: str) -> str:
            if prompt == "a":
                return str(await ask("Go?"))
            await clock.sleep(2)
            return prompt

        others = [Task(f"t{n}", "t", depends_on=[f"t{n - 1}"] if n else []) for n in range(20)]
        dag = DAG([Task("a", "a"), *others])
        async with ParallelRunner(work, store=ReadLater(store), clock=clock).start(dag, "x") as run:
            await clock.sleep(1)
            store.reads = 0
            assert await ParallelRunner(store=store, clock=clock).runs.answer("x", "a", "yes", wait=30)
            assert clock.monotonic() < 9 + 2 * LOOK_EVERY_S + 1
            assert store.reads == 2
            assert (await run.result()).text["a"] == "yes"

    run_seeded(main, 1)
