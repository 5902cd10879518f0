"""PostgresStore keeps the contract, on a real server."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from plait.persistence import PostgresStore
from plait.persistence.contract import StoreContract
from tests.support.stores.postgres import new_store, worker_dsn


class TestPostgresStore(StoreContract):
    def open_store(self, folder: Path) -> AbstractAsyncContextManager[PostgresStore]:
        return new_store()

    def reopen_store(self, folder: Path) -> PostgresStore:
        return PostgresStore(worker_dsn())
