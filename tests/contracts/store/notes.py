"""The store contract: the inbox of a run, to which any process may add a note."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from plait.errors import Conflict, StoreError
from plait.events import RunClaimed, RunReleased
from plait.persistence import Note, NoteRecord
from tests.contracts.store.opened import OpenedStore
from tests.contracts.store.samples import OPENING, RUN, START_A, Writer, at, owner, run_becomes, whole

if TYPE_CHECKING:
    from plait.persistence import Store

CANCEL = Note("cancel", at(5), body='{"seq": 3}')
ANSWER = Note("answer", at(4), "a", '"ja \U0001f311"')


class NotesContract(OpenedStore):
    """Notes to the owner of a run are stored in the order of arrival."""

    async def test_notes_are_numbered_as_they_arrive(self, store: Store, writer: Writer) -> None:
        assert await store.list_notes(RUN) == ()
        for note in (CANCEL, ANSWER, CANCEL):
            await store.send(RUN, note)
        first, second, third = await store.list_notes(RUN)
        assert first == NoteRecord(1, "cancel", at(5), None, '{"seq": 3}')
        assert second == NoteRecord(2, "answer", at(4), "a", '"ja \U0001f311"')
        assert third == NoteRecord(3, "cancel", at(5), None, '{"seq": 3}')
        assert await store.list_notes(RUN, after=1) == (second, third)
        assert await store.list_notes(RUN, after=3) == await store.list_notes(RUN, after=99) == ()
        await writer.write(START_A)
        assert len(await store.list_notes(RUN, after=-1)) == 3

    async def test_a_note_changes_neither_the_run_nor_its_epoch(self, store: Store, writer: Writer) -> None:
        before = await whole(store)
        await store.send(RUN, CANCEL)
        assert await whole(store) == before
        await writer.write(START_A)
        await writer.write(RunClaimed(at(6), owner("next"), 1.0), run_becomes(at(6), "failed"), RunReleased(at(6)))
        await store.send(RUN, ANSWER)
        assert [note.kind for note in await store.list_notes(RUN)] == ["cancel", "answer"]

    async def test_each_run_has_an_inbox_of_its_own(self, store: Store, writer: Writer) -> None:
        await Writer(store, "other").write(*OPENING)
        await store.send(RUN, CANCEL)
        await store.send("other", ANSWER)
        assert [(note.number, note.kind) for note in await store.list_notes("other")] == [(1, "answer")]
        assert [(note.number, note.kind) for note in await store.list_notes(RUN)] == [(1, "cancel")]
        assert writer.run_id == RUN

    async def test_a_note_about_an_unknown_run_is_refused(self, store: Store) -> None:
        with pytest.raises(Conflict, match="'nobody' is not in the store"):
            await store.send("nobody", CANCEL)
        assert await store.list_notes("nobody") == ()

    async def test_many_send_at_once(self, store: Store, writer: Writer) -> None:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(store.send, RUN, Note("answer", at(4), f"t{number}"))
            await writer.write(START_A)
        notes = await store.list_notes(RUN)
        assert [note.number for note in notes] == list(range(1, 21))
        assert {note.task_id for note in notes} == {f"t{number}" for number in range(20)}

    @pytest.mark.parametrize("text", ["", "nul \0 inside", "'; DROP TABLE notes; --", "half \ud83d of a pair"])
    async def test_a_note_is_kept_exactly_or_refused_whole(self, store: Store, writer: Writer, text: str) -> None:
        try:
            await store.send(writer.run_id, Note("answer", at(4), text, text))
        except StoreError:
            assert await store.list_notes(RUN) == ()
        else:
            assert [(note.task_id, note.body) for note in await store.list_notes(RUN)] == [(text, text)]
