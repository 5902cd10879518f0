"""The store contract: everything acknowledged survives closing the store, or the death of the process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plait.errors import Conflict, Fenced
from plait.events import PolicyDecided, RunClaimed
from plait.persistence import NoteRecord
from tests.contracts.store.growth import ADDED
from tests.contracts.store.notes import ANSWER as ANSWER_NOTE
from tests.contracts.store.notes import CANCEL
from tests.contracts.store.opened import OpenedStore, Reopen
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    AT_START,
    CREATED,
    DONE_A,
    NEXT,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
    message,
    owner,
    reworded,
    whole,
)

if TYPE_CHECKING:
    from pathlib import Path


class DurabilityContract(OpenedStore):
    """Acknowledged changes are read again after a reopening. Skipped if the test class has no `reopen_store`."""

    @pytest.mark.parametrize("start", AT_START)
    async def test_a_run_is_unchanged_after_a_reopen(self, tmp_path: Path, reopen: Reopen, start: str) -> None:
        async with self.open_store(tmp_path) as store:
            grown = (replace(ADDED, added_by=None), PolicyDecided(at(5), '{"tries": 2}'))
            await Writer(store).write(*OPENING, *AT_START[start], *grown)
            before, listed = await whole(store), await store.list_runs()
            assert before[0] is not None
        async with reopen(tmp_path) as store:
            assert await whole(store) == before
            assert await store.list_runs() == listed

    @pytest.mark.parametrize("size", [1, 100_000])
    async def test_texts_are_unchanged_after_a_reopen(self, tmp_path: Path, reopen: Reopen, size: int) -> None:
        text = "\U0001f311 nul \0 " * size
        async with self.open_store(tmp_path) as store:
            await Writer(store).write(*OPENING, START_A, reworded(ASK, text), ANSWER, replace(DONE_A, text=text))
        async with reopen(tmp_path) as store:
            task, messages = (await store.list_tasks(RUN))[0], await store.list_messages(RUN, "a")
            assert (task.text, task.damaged) == (text, False)
            assert [message.content for message in messages] == [text, ANSWER.message.content]

    async def test_acknowledged_changes_are_durable_before_close(self, tmp_path: Path, reopen: Reopen) -> None:
        async with self.open_store(tmp_path) as store:
            await Writer(store).write(*OPENING, START_A, ASK)
            await store.send(RUN, CANCEL)
            async with reopen(tmp_path) as other:
                assert await whole(other) == await whole(store)
                assert await other.list_notes(RUN) == await store.list_notes(RUN) != ()

    async def test_batches_continue_after_a_reopen(self, tmp_path: Path, reopen: Reopen) -> None:
        async with self.open_store(tmp_path) as store:
            writer = Writer(store)
            await writer.write(*OPENING)
            last = await writer.write(START_A, ASK)
            before = await whole(store)
        async with reopen(tmp_path) as store:
            writer.store = store
            await store.write(last)
            assert await whole(store) == before
            with pytest.raises(Conflict, match="starts at change 7, but 6 is next"):
                await store.write(replace(last, first_seq=7))
            with pytest.raises(Conflict, match="'run-1' exists already"):
                await Writer(store).write(replace(CREATED, at=at(9)))
            assert await whole(store) == before
            await writer.write(ANSWER, DONE_A)
            with pytest.raises(Conflict):
                await writer.write(NEXT["complete"])
        async with reopen(tmp_path) as store:
            assert [task.status for task in await store.list_tasks(RUN)] == ["completed", "pending", "pending"]
            assert [message.content for message in await store.list_messages(RUN, "a")] == [
                ASK.message.content,
                ANSWER.message.content,
            ]

    async def test_a_former_owner_is_fenced_after_a_reopen(self, tmp_path: Path, reopen: Reopen) -> None:
        async with self.open_store(tmp_path) as store:
            writer = Writer(store)
            await writer.write(*OPENING)
            former = writer.batch(START_A)
            await writer.write(RunClaimed(at(5), owner("next"), 2000.0))
        async with reopen(tmp_path) as store:
            writer.store = store
            for batch in (former, replace(former, first_seq=5)):
                with pytest.raises(Fenced):
                    await store.write(batch)
            run = await store.get_run(RUN)
            assert run is not None
            assert (run.epoch, run.owner, run.last_seq) == (2, owner("next"), 4)
            await writer.write(START_A, message(at(6), "a", 1, "user", "First."))

    async def test_notes_and_their_numbers_continue_after_a_reopen(self, tmp_path: Path, reopen: Reopen) -> None:
        async with self.open_store(tmp_path) as store:
            await Writer(store).write(*OPENING)
            await store.send(RUN, CANCEL)
        async with reopen(tmp_path) as store:
            await store.send(RUN, ANSWER_NOTE)
            assert await store.list_notes(RUN) == (
                NoteRecord(1, "cancel", at(5), None, '{"seq": 3}'),
                NoteRecord(2, "answer", at(4), "a", '"ja \U0001f311"'),
            )
