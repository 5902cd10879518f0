"""PostgresStore keeps the contract, on a real server. One open store serves all tests that do not open a store
themselves, because opening a store costs the server two processes, many times the work of such a test.

`persistence/write_rules.py` decides what may follow a status, before any SQL: tests/persistence/test_contract.py plays
every status, and this file some. What each change leaves behind is read again here after every status.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from plait.persistence import PostgresStore, Store
from tests.contracts.store import StoreContract
from tests.contracts.store.samples import OPENING, Writer
from tests.support.stores.postgres import clear, new_store, worker_dsn


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def opened() -> AsyncGenerator[PostgresStore]:
    async with new_store() as store:
        yield store


@pytest.mark.asyncio(loop_scope="module")
class TestPostgresStore(StoreContract):
    def open_store(self, folder: Path) -> AbstractAsyncContextManager[PostgresStore]:
        return new_store()

    def reopen_store(self, folder: Path) -> PostgresStore:
        return PostgresStore(worker_dsn())

    @pytest_asyncio.fixture(loop_scope="module")
    async def store(self, opened: PostgresStore) -> PostgresStore:
        await clear(opened)
        return opened

    @pytest_asyncio.fixture(loop_scope="module")
    async def writer(self, store: PostgresStore) -> Writer:
        writer = Writer(store)
        await writer.write(*OPENING)
        return writer

    @pytest.mark.parametrize("state", ["running", "waiting"])
    async def test_task_transitions(self, store: Store, state: str) -> None:
        await super().test_task_transitions(store, state)

    @pytest.mark.parametrize("state", ["running"])
    async def test_one_batch_decides_as_two_batches(self, store: Store, state: str) -> None:
        await super().test_one_batch_decides_as_two_batches(store, state)

    @pytest.mark.parametrize("old", ["running"])
    async def test_run_transitions(self, store: Store, old: str) -> None:
        await super().test_run_transitions(store, old)
