"""The SQLite store."""

from plait.persistence.sqlite.store import SQLiteStore
from plait.persistence.tables.purged import Purged

__all__ = ["Purged", "SQLiteStore"]
