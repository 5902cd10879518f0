"""Cancelling a run that nobody runs, that a crash left half cancelled, or whose owner cannot be judged."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.errors import BackendError, ErrorKind, RunNotFound, RunNotResumable, StoreError, StoreRequired
from plait.events import NewTask, RunClaimed, RunCreated, RunReleased
from plait.persistence import Batch, MemoryStore, Note, NoteRecord, Store
from plait.persistence.store_records import EventRecord
from plait.results import ResumeAction
from plait.runner.engine.lease import claim_for_this_process, unregister
from tests.contracts.store.samples import run_becomes
from tests.runner.client.test_cancel_run import CHAIN, Scene
from tests.support.crashed import Dying, die
from tests.support.fakes import QuickClock, Talker
from tests.support.stopped import DIAMOND, stopped_after
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

AT = "2026-01-01T00:00:00.000Z"
ONCE = DAG([Task("pay", prompt="pay", at_most_once=True), Task("tell", prompt="tell", depends_on=["pay"])])


async def queued(store: Store) -> None:
    await store.write(Batch("r", 0, 1, (RunCreated(AT, "r", "", '{"format":100}', (NewTask("a", "p"),)),)))


async def interrupted(store: Store) -> None:
    await stopped_after(store, DIAMOND, 2)


async def crashed(store: Store) -> None:
    await die(store, Dying(lambda prompt: prompt == "b"), CHAIN)


async def waiting(store: Store) -> None:
    await die(store, Dying(lambda prompt: prompt == "pay"), ONCE)
    assert (await ParallelRunner(Talker(), store=store).resume("r")).status is RunStatus.WAITING_INPUT


@pytest.mark.parametrize("leave", [queued, interrupted, crashed, waiting])
async def test_a_run_that_nobody_runs_is_cancelled_at_once(store: Store, leave) -> None:
    await leave(store)
    before = await store.get_run("r")
    assert before is not None
    counting = FaultyStore(store)
    runner = ParallelRunner(Talker(), store=counting)
    assert await runner.runs.cancel("r") is RunStatus.CANCELLED
    after = await store.get_run("r")
    assert after is not None
    assert (counting.writes, after.status, after.owner, after.epoch) == (1, "cancelled", None, before.epoch + 1)
    completed = before.counts.get("completed", 0)
    assert after.counts.get("completed", 0) == completed
    assert after.counts["cancelled"] == sum(before.counts.values()) - completed
    assert await store.list_notes("r") == ()
    assert await runner.runs.cancel("r") is RunStatus.CANCELLED and counting.writes == 1
    with pytest.raises(RunNotResumable, match="cancelled and cannot be resumed"):
        await runner.resume("r")


@pytest.mark.parametrize("finisher", ["resume", "cancel_run"])
async def test_a_crash_between_cancelling_and_cancelled(finisher: str) -> None:
    store = MemoryStore()
    scene = Scene(store)
    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        await scene.cancel()
        await scene.clock.in_grace.wait()
        async for event in run.events():
            if event.kind == "run_cancelling":
                break
        # Nothing more gets into the store, as if the process were dead.
        scene.held.faults = on_write(lambda _: Fault.BEFORE)
        scene.limiter.open.set()
    record = await store.get_run("r")
    assert record is not None and record.owner is not None
    assert (record.status, record.counts) == ("cancelling", {"completed": 1, "running": 1, "pending": 1})
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    preview = await runner.runs.preview("r")
    assert [step.action for step in preview.tasks.values()] == [
        ResumeAction.KEEP,
        ResumeAction.CANCEL,
        ResumeAction.CANCEL,
    ]
    if finisher == "resume":
        async with runner.start_resume("r") as run:
            seen = [event.kind async for event in run.events()]
            result = await run.result()
        assert seen == ["task_cancelled", "task_cancelled", "run_cancelled"]
        assert (result.status, result.text, result["a"].reused) == (RunStatus.CANCELLED, {"a": "<a>"}, True)
    else:
        assert await runner.runs.cancel("r") is RunStatus.CANCELLED
    assert backend.prompts == []
    after = await store.get_run("r")
    assert after is not None
    assert (after.status, after.owner, after.counts) == ("cancelled", None, {"completed": 1, "cancelled": 2})


async def test_a_resume_needs_no_backend_to_finish_a_cancellation(store: Store) -> None:
    await crashed(store)
    await store.send("r", Note("cancel", AT, body='{"seq": 1}'))
    result = await ParallelRunner(backends={}, store=store).resume("r")
    assert result.status is RunStatus.CANCELLED


ODD = ["", "[]", "{}", '{"seq": null}', '{"seq": "x"}', '{"seq": 1e999}', "[1", "[" * 100_000]


@pytest.mark.parametrize("body", ODD)
async def test_a_note_that_does_not_say_what_its_sender_had_seen_counts_all_the_same(body: str) -> None:
    store = MemoryStore()
    await interrupted(store)
    await store.send("r", Note("cancel", AT, body=body))
    assert (await ParallelRunner(Talker(), store=store).resume("r")).status is RunStatus.CANCELLED


async def test_other_notes_cancel_nothing(store: Store) -> None:
    await interrupted(store)
    await store.send("r", Note("answer", AT, "a"))
    assert (await ParallelRunner(Talker(), store=store).resume("r")).status is RunStatus.COMPLETED


async def owned_by_another(store: Store, **changes: object) -> None:
    await interrupted(store)
    record = await store.get_run("r")
    assert record is not None
    owner = claim_for_this_process(AT)
    unregister(owner)
    claim = RunClaimed(AT, replace(owner, **changes), 3_000_000_000.0)  # type: ignore[arg-type]
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (claim,)))


async def test_an_owner_that_cannot_be_judged_is_told_and_watched() -> None:
    store = MemoryStore()
    await owned_by_another(store, host="another host")
    clock = QuickClock()
    runner = ParallelRunner(Talker(), store=store, clock=clock, lease=6.0)
    assert await runner.runs.cancel("r") is RunStatus.CANCELLED
    assert clock.slept == [2.0, 2.0, 2.0]
    assert [note.kind for note in await store.list_notes("r")] == ["cancel"], "in case that it lives"


async def test_an_owner_that_shows_that_it_lives_cancels_by_itself() -> None:
    store = MemoryStore()
    await owned_by_another(store, host="another host")

    class Heeding(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            record = await store.get_run("r")
            assert record is not None
            if record.status == "running":
                change = run_becomes(AT, "cancelling")
                await store.write(Batch("r", record.epoch, record.last_seq + 1, (change,)))

    runner = ParallelRunner(Talker(), store=store, clock=Heeding(), lease=6.0)
    assert await runner.runs.cancel("r") is RunStatus.CANCELLING


@pytest.mark.parametrize(("wait", "slept"), [(1.0, [0.2]), (0.0, [2.0])], ids=["while waited for", "while watched"])
async def test_the_end_of_a_run_by_its_owner_elsewhere_is_seen(wait: float, slept: list[float]) -> None:
    store = MemoryStore()
    await owned_by_another(store, host="another host")

    class Cancelling(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            record = await store.get_run("r")
            assert record is not None
            ended = (run_becomes(AT, "cancelling"), run_becomes(AT, "cancelled"), RunReleased(AT))
            await store.write(Batch("r", record.epoch, record.last_seq + 1, ended))

    clock = Cancelling()
    runner = ParallelRunner(Talker(), store=store, clock=clock, lease=6.0)
    assert await runner.runs.cancel("r", wait=wait) is RunStatus.CANCELLED
    assert clock.slept == slept


async def test_a_run_that_is_taken_over_at_that_very_moment_is_cancelled_there() -> None:
    """Between our reading and our claim somebody resumes the run: then they are told."""
    inner = MemoryStore()
    await interrupted(inner)

    class Contested(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if not self.writes:
                record = await inner.get_run("r")
                assert record is not None
                owner = claim_for_this_process(AT)
                claim = RunClaimed(AT, owner, 3_000_000_000.0)
                await inner.write(Batch("r", record.epoch, record.last_seq + 1, (claim,)))
            await super().write(batch)

    runner = ParallelRunner(Talker(), store=Contested(inner))
    assert await runner.runs.cancel("r") is RunStatus.CANCELLING
    assert [note.kind for note in await inner.list_notes("r")] == ["cancel"]


async def test_an_owner_that_leaves_while_we_wait_is_no_excuse() -> None:
    store = MemoryStore()
    scene = Scene(store)

    class Leaving(FaultyStore):
        async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
            run.stop()
            await run.result()
            return await super().list_notes(run_id, after)

    async with scene.runner.start(CHAIN, "r") as run:
        await scene.limiter.reached.wait()
        other = ParallelRunner(Talker(), store=Leaving(store))
        assert await other.runs.cancel("r", wait=30.0) is RunStatus.CANCELLED
    assert await scene.stored() == ("cancelled", {"a": "completed", "b": "cancelled", "c": "cancelled"})


async def test_what_cannot_be_cancelled(store: Store) -> None:
    with pytest.raises(RunNotFound, match="no run 'r'"):
        await ParallelRunner(Talker(), store=store).runs.cancel("r")
    with pytest.raises(StoreRequired):
        await ParallelRunner(Talker()).runs.cancel("r")
    await interrupted(store)
    with pytest.raises(StoreError, match="planted"):
        await ParallelRunner(Talker(), store=FaultyStore(store, on_write(lambda _: Fault.BEFORE))).runs.cancel("r")
    with pytest.raises(ValueError, match="cancel_grace must be 0 seconds or more, not -1"):
        ParallelRunner(Talker(), cancel_grace=-1)


@pytest.mark.parametrize("again", [False, True])
async def test_a_request_from_before_an_end_is_void_and_a_later_one_is_not(store: Store, *, again: bool) -> None:
    class SmallPages(FaultyStore):
        async def list_events(
            self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
        ) -> tuple[EventRecord, ...]:
            return await super().list_events(run_id, after, min(limit, 2), kind)

    small, began = SmallPages(store), anyio.Event()
    fails = Talker(lambda *_: BackendError(ErrorKind.AUTH, "no key"))
    await ParallelRunner(fails, store=small).run(DAG([Task(name, name) for name in "abc"]), "r")
    await store.send("r", Note("cancel", AT, body='{"seq": 1}'))

    async def hang(_prompt: str) -> str:
        began.set()
        await anyio.sleep_forever()
        return "never"

    async with ParallelRunner(hang, store=store).start_resume("r", retry_failed=True) as run:
        await began.wait()
        run.stop()
    if again:
        record = await store.get_run("r")
        assert record is not None
        await store.send("r", Note("cancel", AT, body=f'{{"seq": {record.last_seq}}}'))
    result = await ParallelRunner(Talker(), store=small).resume("r")
    assert result.status is (RunStatus.CANCELLED if again else RunStatus.COMPLETED)
