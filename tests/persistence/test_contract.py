"""SQLiteStore keeps the contract, and with it MemoryStore, which is the same on a database in memory; PostgresStore:
tests/persistence/postgres/test_contract.py. tests/docs/test_pages.py has the store of docs/guides/stores.md keep it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import StoreError
from plait.events import Event, RunClaimed, SessionOpened, TaskInterrupted, TaskStarted, TaskWaiting
from plait.persistence import Batch, MemoryStore, SQLiteStore
from tests.contracts.store import StoreContract
from tests.contracts.store.samples import CREATED, NEXT, OPENING, RUN, at, message, owner, run_becomes, whole
from tests.support.sizes import size
from tests.support.stores.model_store import ModelStore


class TestSQLiteStore(StoreContract):
    def open_store(self, folder: Path) -> SQLiteStore:
        return SQLiteStore(folder / "runs.db")

    reopen_store = open_store


# A store that forgets does not pass.


class Forgetful(StoreContract):
    """Lives in memory, and says that it does not."""

    def open_store(self, folder: Path) -> MemoryStore:
        return MemoryStore()

    reopen_store = open_store


class Late(StoreContract):
    """Is there for others only once it was closed."""

    def __init__(self) -> None:
        self.closed = MemoryStore()

    @asynccontextmanager
    async def open_store(self, folder: Path) -> AsyncGenerator[MemoryStore]:
        async with MemoryStore() as store:
            yield store
        self.closed = store

    def reopen_store(self, folder: Path) -> MemoryStore:
        return self.closed


@pytest.mark.parametrize(
    "promise",
    [
        lambda store, folder: store.test_a_run_is_unchanged_after_a_reopen(folder, store.reopen_store, "running"),
        lambda store, folder: store.test_texts_are_unchanged_after_a_reopen(folder, store.reopen_store, 1),
        lambda store, folder: store.test_batches_continue_after_a_reopen(folder, store.reopen_store),
        lambda store, folder: store.test_a_former_owner_is_fenced_after_a_reopen(folder, store.reopen_store),
        lambda store, folder: store.test_notes_and_their_numbers_continue_after_a_reopen(folder, store.reopen_store),
    ],
    ids=["runs", "texts", "batches", "fences", "notes"],
)
async def test_a_store_that_forgets_is_found_out(promise: Callable[..., Awaitable[None]], tmp_path: Path) -> None:
    await promise(Late(), tmp_path)
    with pytest.raises((AssertionError, IndexError, StoreError)):
        await promise(Forgetful(), tmp_path)


async def test_a_store_that_keeps_what_it_has_only_when_closed_is_found_out(tmp_path: Path) -> None:
    store = Late()
    with pytest.raises(AssertionError):
        await store.test_acknowledged_changes_are_durable_before_close(tmp_path, store.reopen_store)


# A store does as the model: any batches, in any state, written again or not, by whoever.

CHANGES: list[Event] = [
    *NEXT.values(),
    *(replace(change, task_id="c") for change in NEXT.values()),  # type: ignore[call-arg]
    TaskStarted(at(6), "a", 1, "fast", "s"),
    TaskStarted(at(6), "a", 2, 'odd "name"\n\\ é', "s"),
    TaskStarted(at(6), "a", 3, "fast"),
    SessionOpened(at(6), "a", 2, "u"),
    SessionOpened(at(6), "c", 0, "v"),
    SessionOpened(at(6), "a", 1, "t"),
    SessionOpened(at(6), "a", 0, "w"),
    message(at(6), "a", 1, "user", "hello"),
    TaskStarted(at(6), "a", 2, "fast", "s", confirmed=True),
    TaskWaiting(at(6), "a", 2, "Crashed?", crashed=True),
    TaskInterrupted(at(6), "a", 1, "crash", crashed=True),
    RunClaimed(at(6), owner("next"), 9.0),
    run_becomes(at(6), "completed"),
    CREATED,
]
BATCHES = st.lists(
    st.tuples(st.lists(st.sampled_from(CHANGES), max_size=5), st.integers(-2, 1), st.integers(-1, 1)), max_size=12
)


async def outcomes(store: ModelStore | SQLiteStore, batches: list[tuple[list[Event], int, int]]) -> list[object]:
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


@pytest.mark.slow
@settings(max_examples=size(20, 60))
@given(BATCHES)
def test_the_store_does_as_the_model(batches: list[tuple[list[Event], int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_file = asyncio.run(outcomes(SQLiteStore(Path(folder) / "runs.db"), batches))
    assert asyncio.run(outcomes(ModelStore(), batches)) == in_file
