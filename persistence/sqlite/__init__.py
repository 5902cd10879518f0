"""The SQLite store."""

from plait.persistence.delete_runs import Purged
from plait.persistence.sqlite.store import SQLiteStore

__all__ = ["Purged", "SQLiteStore"]
