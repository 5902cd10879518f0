"""The contract of a store, as tests: subclass `StoreContract`, define `open_store`, and run pytest.

Needs pytest, pytest-asyncio in `auto` mode, and of plait only `persistence`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from plait.errors import Conflict, Fenced, Gap, StoreError
from plait.events import (
    Event,
    LeaseRenewed,
    MessageAppended,
    NewTask,
    NodeStarted,
    PolicyDecided,
    RunClaimed,
    RunReleased,
    SessionOpened,
    TaskCompleted,
    TasksAdded,
    TaskStarted,
)
from plait.persistence import Batch, Note, Store
from plait.usage import Usage
from tests.contracts.store.durability import DurabilityContract
from tests.contracts.store.growth import GrowthContract
from tests.contracts.store.interrupts import InterruptsContract
from tests.contracts.store.notes import NotesContract
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.questions import QuestionsContract
from tests.contracts.store.reads import ReadsContract
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    AT_START,
    CLAIMED,
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    RUNNING,
    START_A,
    Writer,
    at,
    cancel_natively,
    cancel_scope,
    case,
    message,
    owner,
    reworded,
    run_becomes,
    whole,
    without_messages,
)
from tests.contracts.store.usage import UsageContract

if TYPE_CHECKING:
    from pathlib import Path


def _of_an_owner() -> dict[str, Event]:
    """Every kind of change that the owner of a run may write while the task `a` is running."""
    changes: dict[str, Event] = {
        "completed": DONE_A,
        "completed with its prompt": replace(DONE_A, turn="First."),
        "message": ASK,
        "session": SessionOpened(at(4), "a", 1, "other"),
        "node": NodeStarted(at(4), "a", 1, "node"),
        "lease": LeaseRenewed(at(9), 3000.0),
        "end of the run": run_becomes(at(9), "completed"),
        "release": RunReleased(at(9)),
        "policy": PolicyDecided(at(4), "{}"),
        "added tasks": TasksAdded(at(4), (NewTask("new", "new"),)),
        "start": replace(START_A, task_id="b"),
    }
    ends = {name: sample[-1] for name, sample in AT_START.items() if len(sample) == 2 and sample[0] == START_A}
    return changes | ends


MANY, MANY_NOTES = 1500, 150
"""More rows than a page of results has in most databases."""


async def is_kept(store: Store, change: Any) -> None:
    """Assert that what `change` holds is what is read."""
    if isinstance(change, MessageAppended):
        kept = (await store.list_messages(RUN, "a"))[-1]
        assert (kept.content, kept.input_tokens) == (change.message.content, change.message.usage.input_tokens)
    else:
        task = (await store.list_tasks(RUN))[0]
        assert (task.text, task.usage) == (change.text, change.usage)


class StoreContract(
    ReadsContract,
    InterruptsContract,
    NotesContract,
    GrowthContract,
    QuestionsContract,
    UsageContract,
    DurabilityContract,
):
    """The tests of every line of `persistence.Store`."""

    # All or nothing, once or many times.

    async def test_the_last_change_of_a_large_batch_can_undo_all_of_it(self, store: Store) -> None:
        ids = [f"t{number}" for number in range(700)]
        writer = Writer(store)
        await writer.write(replace(CREATED, tasks=tuple(NewTask(task_id, "p") for task_id in ids)), CLAIMED, RUNNING)
        before = await without_messages(store)
        starts = [TaskStarted(at(3), task_id, 1, "fast") for task_id in ids]
        with pytest.raises(Conflict, match="t5"):
            await writer.write(*starts, TaskStarted(at(4), "t5", 1, "fast"))
        assert await without_messages(store) == before
        await writer.write(*starts)
        await writer.write(*(TaskCompleted(at(4), task_id, 1, f"result of {task_id}") for task_id in ids))
        stored = await store.list_tasks(RUN)
        assert [(t.task_id, t.text) for t in stored] == [(task_id, f"result of {task_id}") for task_id in ids]

    @pytest.mark.parametrize("kept", range(1, 8))
    async def test_a_batch_can_be_written_again_whole_or_longer(self, store: Store, kept: int) -> None:
        changes = (*OPENING, START_A, ASK, ANSWER, DONE_A)
        await store.write(Batch(RUN, 0, 1, changes[:kept]))
        await store.write(Batch(RUN, 0, 1, changes))
        once = await whole(store)
        assert (once[0].last_seq, len(once[3][0]), len(once[4])) == (7, 2, 4)
        await store.write(Batch(RUN, 0, 1, changes))
        await store.write(Batch(RUN, 0, 1, changes[:kept]))
        await store.write(Batch(RUN, 1, 4, changes[3:5]))
        assert await whole(store) == once

    async def test_an_old_batch_is_a_success_after_others(self, store: Store, writer: Writer) -> None:
        first = await writer.write(START_A, ASK)
        await writer.write(ANSWER, DONE_A)
        await writer.write(RunClaimed(at(5), owner("next"), 1.0))
        before = await whole(store)
        await store.write(first)
        assert await whole(store) == before

    async def test_a_gap_is_refused(self, store: Store, writer: Writer) -> None:
        with pytest.raises(Gap, match="starts at change 5, but 4 is next") as refusal:
            await store.write(Batch(RUN, 1, 5, (START_A,)))
        assert refusal.value.next_seq == 4
        with pytest.raises(Gap) as refusal:
            await store.write(Batch("unknown", 1, 5, (START_A,)))
        assert refusal.value.next_seq == 1
        with pytest.raises(Conflict):
            await store.write(Batch(RUN, 0, 0, (START_A,) * 9))
        await writer.write(START_A)

    async def test_a_store_that_has_lost_a_claim_names_the_gap(self, store: Store) -> None:
        await Writer(store).write(CREATED)
        with pytest.raises(Gap) as refusal:
            await store.write(Batch(RUN, 1, 4, (START_A,)))
        assert refusal.value.next_seq == 2
        await store.write(Batch(RUN, 0, 2, (CLAIMED, RUNNING, START_A)))

    async def test_a_former_owner_beyond_a_gap_is_fenced(self, store: Store, writer: Writer) -> None:
        await writer.write(RunClaimed(at(5), owner("next"), 1.0))
        with pytest.raises(Fenced):
            await store.write(Batch(RUN, 1, 9, (START_A,)))

    async def test_a_batch_for_an_unknown_run_is_refused(self, store: Store) -> None:
        with pytest.raises(Conflict, match="'run-1' is not in the store"):
            await store.write(Batch(RUN, 0, 1, (RUNNING,)))
        with pytest.raises(Conflict):
            await store.write(Batch(RUN, 0, 4, (CREATED,)))
        with pytest.raises(Conflict):
            await store.write(Batch(RUN, 0, 1, (CREATED, RUNNING, CREATED)))
        assert await store.list_runs() == ()

    @pytest.mark.parametrize(
        "other",
        [
            (replace(CREATED, at=at(9)),),
            (replace(CREATED, settings="{}"),),
            (replace(CREATED, settings=CREATED.settings[:-1]),),
            (replace(CREATED, name=CREATED.name[:-1]),),
            (CREATED, RunClaimed(at(1), owner("somebody else"), 1000.5)),
        ],
        ids=[
            "another time",
            "other settings",
            "settings that begin alike",
            "a name that begins alike",
            "another owner",
        ],
    )
    async def test_a_second_creator_of_a_run_is_refused(self, store: Store, other: tuple[Event, ...]) -> None:
        await Writer(store).write(*OPENING)
        before = await whole(store)
        with pytest.raises(Conflict, match="'run-1' exists already"):
            await Writer(store).write(*other)
        assert await whole(store) == before

    # One owner at a time.

    async def test_a_former_owner_is_fenced(self, store: Store, writer: Writer) -> None:
        former = replace(writer.batch(START_A, DONE_A))
        await writer.write(RunClaimed(at(5), owner("next"), 2000.0), replace(START_A, task_id="c"))
        before = await whole(store)
        for batch in (former, replace(former, first_seq=6), replace(former, first_seq=9), replace(former, epoch=3)):
            with pytest.raises(Fenced, match="epoch"):
                await store.write(batch)
        assert await whole(store) == before
        await writer.write(START_A)

    async def test_a_former_owner_is_fenced_whatever_it_writes(self, store: Store, tmp_path: Path) -> None:
        """Each kind of change alone, in particular a result: over the store of the new owner, and over the store of the
        former, which remembers the run as it was.
        """
        former = Writer(store)
        await former.write(*OPENING, START_A)
        stale = {name: former.batch(change) for name, change in _of_an_owner().items()}
        ends_with_its_process = type(self).reopen_store is OpenedStore.reopen_store
        async with nullcontext(store) if ends_with_its_process else self.reopen_store(tmp_path) as others:
            other = Writer(others)
            other.next_seq, other.epoch = former.next_seq, former.epoch
            await other.write(RunClaimed(at(5), owner("next"), 2000.0))
            before = await whole(others)
            for name, batch in stale.items():
                for wrong in (batch, replace(batch, first_seq=other.next_seq)):
                    for place in (store, others):
                        with case(f"{name}, change {wrong.first_seq}"), pytest.raises(Fenced):
                            await place.write(wrong)
            assert await whole(others) == before
            await other.write(DONE_A)

    async def test_a_writer_whose_claim_is_another_in_the_store_is_fenced(self, store: Store, writer: Writer) -> None:
        """A server that lost the claim in a failover may have another one in its place, with the same epoch."""
        before = await whole(store)
        for first_seq, changes in ((4, (START_A,)), (3, (RUNNING, START_A)), (3, (RUNNING,))):
            with pytest.raises(Fenced, match="has another owner"):
                await store.write(Batch(RUN, 1, first_seq, changes, "another"))
        assert await whole(store) == before
        await store.write(Batch(RUN, 1, 4, (START_A,), "owner-1"))

    async def test_a_batch_of_an_epoch_that_was_never_claimed_is_fenced(self, store: Store, writer: Writer) -> None:
        before = await whole(store)
        for epoch in (0, 2):
            with pytest.raises(Fenced, match=f"written at epoch {epoch}, the run is at epoch 1"):
                await store.write(replace(writer.batch(START_A), epoch=epoch))
        assert await whole(store) == before
        batch = await writer.write(START_A, ASK)
        before = await whole(store)
        for epoch in (0, 2):  # the beginning of the batch is stored already
            with pytest.raises(Fenced, match=f"written at epoch {epoch}, the run is at epoch 1"):
                await store.write(replace(batch, epoch=epoch, events=(START_A, ASK, DONE_A)))
        assert await whole(store) == before

    async def test_each_claim_of_a_batch_is_fenced(self, store: Store, writer: Writer) -> None:
        first, second, other = (RunClaimed(at(5), owner(name), 2000.0) for name in ("first", "second", "other"))
        batch = writer.batch(first, START_A, second, DONE_A)
        await store.write(batch)
        before = await whole(store)
        for changes in ((first, START_A, other, DONE_A), (first, START_A), (first, START_A, DONE_A, DONE_A)):
            refused = replace(batch, events=changes)
            if changes == (first, START_A):
                await store.write(refused)  # the beginning of the stored batch
            else:
                with pytest.raises(Fenced):
                    await store.write(refused)
        assert await whole(store) == before

    async def test_of_two_claims_one_wins(self, store: Store, writer: Writer) -> None:
        await store.write(writer.batch(RunClaimed(at(5), owner("left"), 2000.0)))
        with pytest.raises(Fenced):
            await store.write(writer.batch(RunClaimed(at(5), owner("right"), 2000.0)))
        await store.write(writer.batch(RunClaimed(at(5), owner("left"), 2000.0)))
        run = await store.get_run(RUN)
        assert run is not None
        assert (run.epoch, run.owner) == (2, owner("left"))

    # Many at once, and cut off.

    async def test_many_writers_and_readers_at_once(self, store: Store) -> None:
        async def one(number: int) -> None:
            writer = Writer(store, f"run-{number}")
            await writer.write(*OPENING)
            for change in (START_A, ASK, ANSWER, DONE_A):
                await writer.write(change)
                seen = await store.get_run(writer.run_id)
                assert seen is not None
                assert seen.last_seq == writer.next_seq - 1

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(one, number)
        assert [run.counts for run in await store.list_runs()] == [{"completed": 1, "pending": 2}] * 20

    @pytest.mark.parametrize("native", [False, True], ids=["anyio", "asyncio"])
    async def test_a_cancelled_write_is_whole_or_not_there(self, store: Store, *, native: bool) -> None:
        for steps in range(12):
            writer = Writer(store, f"run-{steps}")
            batch = writer.batch(*OPENING, START_A, ASK, ANSWER, DONE_A)
            await (cancel_natively if native else cancel_scope)(store, batch, steps)
            seen = await store.get_run(writer.run_id)
            assert seen is None or seen.last_seq == 7
            await Writer(store, f"other-{steps}").write(*OPENING)
            await store.write(batch)
            assert len(await store.list_messages(writer.run_id, "a")) == 2

    # Odd values.

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "nul \0 inside",
            "'; DROP TABLE runs; --",
            "%s ? :a {{ x }}",
            "\U0001f311 \u202e \r\n",
            "\u00e4 a\u0308 ",
            "x" * 10_000_000,
        ],
        ids=["empty", "nul", "quotes", "placeholders", "unicode", "accents", "10 MB"],
    )
    async def test_texts_are_read_unchanged(self, store: Store, writer: Writer, text: str) -> None:
        await writer.write(START_A, reworded(ASK, text), replace(DONE_A, text=text))
        task, (message,) = (await store.list_tasks(RUN))[0], await store.list_messages(RUN, "a")
        assert (task.text, message.content, task.damaged, message.damaged) == (text, text, False, False)

    async def test_ids_are_compared_byte_by_byte(self, store: Store) -> None:
        odd = ("a'b", 'a"b', "a%_b", "a?b", "a", "A", "\u00e4", "a\u0308", " a ", "a ", "\u00df", "ss")
        writer = Writer(store, "run '1' %s ?")
        await writer.write(replace(CREATED, tasks=tuple(NewTask(task_id, "p") for task_id in odd)), CLAIMED)
        for task_id in odd:
            await writer.write(replace(START_A, task_id=task_id), replace(DONE_A, task_id=task_id, text=task_id))
        assert [task.text for task in await store.list_tasks(writer.run_id)] == list(odd)
        for other in ("RUN '1' %s ?", "run '1' %s ? ", "run '1' %s _"):
            assert await store.get_run(other) is None

    async def test_reads_have_no_limit(self, store: Store) -> None:
        names = [f"t{number}" for number in range(MANY)]
        writer = Writer(store, "many")
        await writer.write(replace(CREATED, tasks=tuple(NewTask(name, "p") for name in names)), CLAIMED, RUNNING)
        await writer.write(*(replace(START_A, task_id=name) for name in names))
        await writer.write(*(message(at(3), "t0", 1, "user", name) for name in names))
        for name in names[:MANY_NOTES]:
            await store.send("many", Note("answer", at(5), body=f'"{name}"'))
        assert [task.task_id for task in await store.list_tasks("many")] == names
        assert [one.task_id for one in await store.list_attempts("many")] == names
        assert [one.content for one in await store.list_messages("many", "t0")] == names
        assert [one.body for one in await store.list_notes("many")] == [f'"{name}"' for name in names[:MANY_NOTES]]
        started, after = list[str | None](), 0
        while page := await store.list_events("many", after):
            started += [event.task_id for event in page if event.kind == "task_started"]
            after = page[-1].seq
        assert started == names

    async def test_numbers_are_kept_to_the_last_digit(self, store: Store, writer: Writer) -> None:
        done = replace(DONE_A, usage=Usage(3_000_000_007, 2**40, 1234.1), duration_s=0.1)
        await writer.write(START_A, done)
        task, (attempt,), run = (
            (await store.list_tasks(RUN))[0],
            await store.list_attempts(RUN),
            await store.get_run(RUN),
        )
        assert run is not None
        for one in (task, attempt, run):
            assert one.usage == Usage(3_000_000_007, 2**40, 1234.1)
        assert task.duration_s == attempt.duration_s == 0.1

    @pytest.mark.parametrize(
        "change",
        [
            reworded(ASK, "half \ud83d of a pair"),
            message(at(3), "a", 1, "user", "First.", 2**63),
            message(at(3), "a", 1, "user", "First.", -(2**80)),
            message(at(3), "a", 1, "user", "First.", -5),
            replace(DONE_A, text="half \udc00"),
            replace(DONE_A, usage=Usage(output_tokens=2**70)),
        ],
        ids=["surrogate in a turn", "2**63", "-2**80", "-5", "surrogate in a result", "2**70"],
    )
    async def test_a_value_is_kept_exactly_or_refused_whole(self, store: Store, writer: Writer, change: Any) -> None:
        await writer.write(START_A)
        before = await whole(store)
        try:
            await writer.write(ASK, change)
        except StoreError:
            assert await whole(store) == before
            await writer.write(ASK, DONE_A)
        else:
            await is_kept(store, change)
