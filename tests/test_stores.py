"""Every store of ours keeps the contract; tests/test_docs.py has the one of docs/stores.md keep it."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persistence import (
    Batch,
    Change,
    MemoryStore,
    RunClaimed,
    RunStatusChanged,
    SessionOpened,
    SQLiteStore,
    StoreError,
    TaskInterrupted,
    TaskStarted,
    TaskWaiting,
    TurnAppended,
)
from persistence.contract import StoreContract
from persistence.contract.samples import CREATED, NEXT, OPENING, RUN, at, owner, whole


class TestMemoryStore(StoreContract):
    def open_store(self, folder: Path) -> MemoryStore:
        return MemoryStore()


class TestSQLiteStore(StoreContract):
    @pytest.fixture
    def tmp_path(self, quick_folder: Path) -> Path:
        return quick_folder

    def open_store(self, folder: Path) -> SQLiteStore:
        return SQLiteStore(folder / "runs.db")


# Two stores, one behaviour: any batches, in any state, written again or not, by whoever.

CHANGES: list[Change] = [
    *NEXT.values(),
    *(replace(change, task_id="c") for change in NEXT.values()),  # type: ignore[call-arg]
    TaskStarted(at(6), "a", 1, "fast", "s"),
    TaskStarted(at(6), "a", 2, 'odd "name"\n\\ é', "s"),
    TaskStarted(at(6), "a", 3, "fast"),
    SessionOpened(at(6), "a", 2, "u"),
    SessionOpened(at(6), "c", 0, "v"),
    SessionOpened(at(6), "a", 1, "t"),
    SessionOpened(at(6), "a", 0, "w"),
    TurnAppended(at(6), "a", 1, "user", "hello"),
    TaskStarted(at(6), "a", 2, "fast", "s", confirmed=True),
    TaskWaiting(at(6), "a", 2, "Crashed?", crashed=True),
    TaskInterrupted(at(6), "a", 1, "crash", crashed=True),
    RunClaimed(at(6), owner("next"), 9.0),
    RunStatusChanged(at(6), "completed"),
    CREATED,
]
BATCHES = st.lists(
    st.tuples(st.lists(st.sampled_from(CHANGES), max_size=5), st.integers(-2, 1), st.integers(-1, 1)), max_size=12
)


async def outcomes(store: MemoryStore | SQLiteStore, batches: list[tuple[list[Change], int, int]]) -> list[object]:
    seen: list[object] = []
    async with store:
        await store.write(Batch(RUN, 0, 1, OPENING))
        for changes, shift, other_epoch in batches:
            run = await store.get_run(RUN)
            assert run is not None
            batch = Batch(RUN, run.epoch + (other_epoch if shift else 0), run.last_seq + 1 + shift, tuple(changes))
            try:
                await store.write(batch)
            except StoreError as error:
                seen.append(type(error))
            seen.append(await whole(store))
    return seen


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_both_stores_do_the_same(batches: list[tuple[list[Change], int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_file = asyncio.run(outcomes(SQLiteStore(Path(folder) / "runs.db"), batches))
    assert asyncio.run(outcomes(MemoryStore(), batches)) == in_file
