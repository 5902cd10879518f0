"""The SQLite store."""

from plait.persistence.old_tables.purged import Purged
from plait.persistence.sqlite.store import SQLiteStore

__all__ = ["Purged", "SQLiteStore"]
