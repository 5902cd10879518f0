"""The stores on plain tables keep the contract, before they take the names of the stores that they replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.persistence.contract import StoreContract
from plait.persistence.sqlite_store import MemoryStore, SQLiteStore


class TestPlainMemory(StoreContract):
    def open_store(self, folder: Path) -> MemoryStore:
        return MemoryStore()


class TestPlainSQLite(StoreContract):
    @pytest.fixture
    def tmp_path(self, quick_folder: Path) -> Path:
        return quick_folder

    def open_store(self, folder: Path) -> SQLiteStore:
        return SQLiteStore(folder / "runs.db")

    reopen_store = open_store
