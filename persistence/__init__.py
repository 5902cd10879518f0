"""Stores: they keep the runs of plait."""

from importlib import import_module
from typing import TYPE_CHECKING

from plait.persistence.sqlite_store import MemoryStore, SQLiteStore
from plait.persistence.store_protocol import ContextStore, FilesStore, RunStore, ServerStore, Store, TaskStore
from plait.persistence.store_records import (
    AttemptRecord,
    Batch,
    EventRecord,
    MessageRecord,
    Note,
    NoteRecord,
    Purged,
    RunRecord,
    TaskRecord,
)
from plait.statuses import AttemptStatus

if TYPE_CHECKING:
    from plait.persistence.postgres_store import PostgresStore

__all__ = [
    "AttemptRecord",
    "AttemptStatus",
    "Batch",
    "ContextStore",
    "EventRecord",
    "FilesStore",
    "MemoryStore",
    "MessageRecord",
    "Note",
    "NoteRecord",
    "PostgresStore",
    "Purged",
    "RunRecord",
    "RunStore",
    "SQLiteStore",
    "ServerStore",
    "Store",
    "TaskRecord",
    "TaskStore",
]


def __getattr__(name: str) -> object:
    """Import the store that needs an extra when it is first used."""
    if name == "PostgresStore":
        return import_module("plait.persistence.postgres_store").PostgresStore
    raise AttributeError(f"module 'plait.persistence' has no attribute {name!r}")
