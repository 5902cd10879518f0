"""Stores on servers: what a failover loses is written again, and the end of a run waits for a server that is away."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.errors import Gap, OwnershipLost, StoreError
from plait.events import (
    NewTask,
    Owner,
    RunClaimed,
    RunEnded,
    RunReleased,
    StoreAwaited,
    StoreDegraded,
    StoreRecovered,
    TasksAdded,
)
from plait.persistence import Batch, MemoryStore, SQLiteStore
from plait.persistence.store_records import Note, NoteRecord, RunRecord
from plait.runner.engine import checkpointer, inbox
from plait.runner.engine.checkpointer import SERVER_PATIENCE_S
from tests.contracts.store.samples import run_becomes
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.faulty_store import FaultyStore, copy_of
from tests.support.stores.on_server import OnServer

CHAIN = DAG([Task(f"t{i}", prompt=str(i), depends_on=[f"t{i - 1}"] if i else []) for i in range(20)])


class Replicated(FaultyStore):
    """A store with a copy: `promote` puts the copy in its place."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.standby = MemoryStore()

    def synchronise(self) -> None:
        assert isinstance(self.inner, MemoryStore)
        self.standby = copy_of(self.inner)

    def promote(self) -> None:
        self.inner = self.standby


class Server(OnServer, Replicated):
    """A server with a standby."""


def failing_over(store: Replicated, synchronised_at: str | None = "3", after: str = "10") -> ParallelRunner:
    """A runner during whose task `after` the standby is promoted, last synchronised in task `synchronised_at`."""

    async def body(prompt: str) -> str:
        if prompt == synchronised_at:
            store.synchronise()
        if prompt == after:
            store.promote()
        return f"{prompt} done"

    return ParallelRunner(body, store=store)


async def whole(store: Server, run_id: str) -> RunRecord:
    tasks = await store.inner.list_tasks(run_id)
    assert [task.text for task in tasks] == [f"{i} done" for i in range(20)]
    assert {task.attempt for task in tasks} == {1}
    record = await store.inner.get_run(run_id)
    assert record is not None
    return record


@pytest.mark.parametrize("synchronised_at", ["3", None])
async def test_a_store_that_fell_behind_is_written_again(
    synchronised_at: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """From the place where it stands, and from the first change if it has nothing of the run."""
    store = Server(MemoryStore())
    async with failing_over(store, synchronised_at).start(CHAIN) as run:
        told = [event async for event in run.events()]
        result = await run.result()
    assert result.status is RunStatus.COMPLETED
    record = await whole(store, result.run_id)
    assert (record.status, record.owner, record.epoch) == ("completed", None, 1)
    [gap] = result.degraded
    assert gap.lost == 0 and gap.until is not None
    assert any(isinstance(one, StoreDegraded) for one in told) and any(isinstance(one, StoreRecovered) for one in told)
    assert "changes_written_again" in caplog.text


async def test_a_gap_that_is_larger_than_what_is_kept_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointer, "KEPT_BYTES", 2000)
    store = Server(MemoryStore())
    with caplog.at_level(logging.WARNING):
        result = await failing_over(store).run(CHAIN)
    assert result.status is RunStatus.COMPLETED
    [lost] = result.degraded
    assert lost.until is None and lost.lost > 2 * 9
    assert "the store is behind" in lost.error and "no longer keeps" in lost.error
    assert caplog.text.count("store_degraded run=") == 1


async def test_the_lost_changes_are_stored_once_the_old_server_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "KEPT_BYTES", 2000)
    store, clock = Server(MemoryStore()), QuickClock()
    primary = store.inner

    async def body(prompt: str) -> str:
        if prompt == "3":
            store.synchronise()
        if prompt == "10":
            store.promote()
        if prompt == "15":
            store.inner = primary
        return f"{prompt} done"

    result = await ParallelRunner(body, store=store, clock=clock).run(CHAIN)
    assert [one.lost for one in result.degraded] == [0]
    await whole(store, result.run_id)


async def test_a_run_that_another_owner_took_in_the_promoted_standby_is_left_alone() -> None:
    """Although its epoch is ours, because our claim was lost with the changes."""
    store, owner = Server(MemoryStore()), Owner("another", "host", "boot", 1, "1", "2026-01-01T00:00:00.000Z")
    at = owner.claimed_at
    claim = RunClaimed(at, owner, 4e10), run_becomes(at, "running")

    async def body(prompt: str) -> str:
        if prompt == "10":
            store.promote()
            await store.inner.write(Batch("queued", 0, 2, claim))
        return prompt

    await ParallelRunner(body, store=store).runs.create(CHAIN, "queued")
    store.synchronise()
    with pytest.raises(OwnershipLost):
        await ParallelRunner(body, store=store).resume("queued")
    record = await store.inner.get_run("queued")
    assert record is not None
    assert (record.owner, record.counts) == (owner, {"pending": len(CHAIN)})


async def test_notes_are_read_again_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new note may have the number of a note that the server has lost with the changes."""
    monkeypatch.setattr(inbox, "LOOK_EVERY_S", 0.01)
    read = anyio.Event()

    class Reading(Server):
        async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
            if after == 2:
                read.set()
            return await super().list_notes(run_id, after)

    store = Reading(MemoryStore())

    async def body(prompt: str) -> str:
        if prompt == "1":
            store.synchronise()
        if prompt == "3":
            await store.inner.send("r", Note("unknown", "2026-01-01T00:00:00.000Z"))
            await store.inner.send("r", Note("unknown", "2026-01-01T00:00:00.000Z"))
            await read.wait()
            store.promote()
        if prompt == "5":
            await ParallelRunner(body, store=store).runs.cancel("r")
            await anyio.sleep_forever()
        return prompt

    with anyio.fail_after(60):
        result = await ParallelRunner(body, store=store, cancel_grace=0).run(CHAIN, "r")
    assert result.status is RunStatus.CANCELLED


async def test_a_store_on_this_machine_keeps_nothing() -> None:
    """An older copy in the place of a file is an error of its owner, and costs no memory before."""
    store = Replicated(MemoryStore())
    result = await failing_over(store).run(CHAIN)
    [lost] = result.degraded
    assert lost.lost > 2 * 9


def test_changes_are_kept_for_a_time_and_up_to_a_size() -> None:
    kept = checkpointer.KeptEvents()
    change = RunReleased("x" * (checkpointer.KEPT_BYTES // 3))
    kept.add(1, (change,), 0.0)
    kept.add(2, (change,), 1.0)
    kept.add(3, (change,), 2.0)
    assert kept.take_from(1) is None
    assert kept.take_from(2) == (change, change)
    assert kept.take_from(2) is None
    kept.add(2, (change,), 3.0)
    kept.add(3, (RunReleased("y"),), 4.0 + checkpointer.KEPT_S)
    assert kept.take_from(2) is None
    assert kept.take_from(3) == (RunReleased("y"),)
    large = NewTask("a", "x" * (checkpointer.KEPT_BYTES // 2))
    kept.add(3, (TasksAdded("now", (large, large)),), 200.0)
    assert kept.take_from(3) is None


class AwayAtTheEnd(OnServer, FaultyStore):
    """A server that is away from the middle of a run until `seconds` after the run's end."""

    def __init__(self, inner: SQLiteStore, clock: QuickClock, seconds: float) -> None:
        super().__init__(inner)
        self._clock, self._seconds = clock, seconds
        self._ends: float | None = None
        self.is_away = False

    async def write(self, batch: Batch) -> None:
        if any(isinstance(change, RunEnded) for change in batch.events) and self._ends is None:
            self._ends = self._clock.monotonic() + self._seconds
        if self.is_away and (self._ends is None or self._clock.monotonic() < self._ends):
            raise StoreError("the server is away")
        await super().write(batch)


@pytest.mark.parametrize("away", [120.0, 2 * SERVER_PATIENCE_S])
async def test_the_end_of_a_run_waits_for_a_server(
    away: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = QuickClock()
    async with SQLiteStore(tmp_path / "runs.db") as inner:
        store = AwayAtTheEnd(inner, clock, away)
        prompts: list[str] = []

        async def body(prompt: str) -> str:
            prompts.append(prompt)
            store.is_away = store.is_away or prompt == "5"
            return prompt

        with caplog.at_level(logging.WARNING):
            async with ParallelRunner(body, store=store, clock=clock).start(CHAIN) as run:
                told = [event async for event in run.events()]
                result = await run.result()
        [awaited] = [event for event in told if isinstance(event, StoreAwaited)]
        assert awaited.seconds == SERVER_PATIENCE_S and awaited.changes > 2 * 14
        assert caplog.text.count("waiting_for_store run=") == 1
        is_back = away < SERVER_PATIENCE_S
        assert [one.lost == 0 for one in result.degraded] == [is_back]
        again = await ParallelRunner(body, store=inner, clock=clock).resume(result.run_id)
        assert again.status is RunStatus.COMPLETED
        assert (len(prompts) == len(CHAIN)) is is_back


@pytest.mark.parametrize("how", ["stop", "cancel the caller"])
async def test_a_stop_ends_the_wait_for_a_server(how: str) -> None:
    store = Server(MemoryStore())

    async def away(batch: Batch) -> None:
        raise StoreError("the server is away")

    async def body(prompt: str) -> str:
        if prompt == "5":
            store.write = away
        return prompt

    with anyio.fail_after(60), anyio.CancelScope() as caller:
        async with ParallelRunner(body, store=store).start(CHAIN) as run:
            async for event in run.events():
                if isinstance(event, StoreAwaited):
                    run.stop() if how == "stop" else caller.cancel()
            result = await run.result()
            assert result.status is RunStatus.COMPLETED
            assert [one.lost > 0 for one in result.degraded] == [True]
    assert caller.cancelled_caught is (how != "stop")


async def test_an_error_of_the_gap_names_the_missing_change() -> None:
    store = MemoryStore()
    result = await ParallelRunner(Talker(), store=store).run(DAG([Task("a", "a")]))
    record = await store.get_run(result.run_id)
    assert record is not None
    with pytest.raises(Gap) as gap:
        await store.write(Batch(result.run_id, 1, record.last_seq + 3, (RunReleased("now"),)))
    assert gap.value.next_seq == record.last_seq + 1
