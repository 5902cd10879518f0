"""The SQLite store."""

from persistence.sqlite.purge import Purged
from persistence.sqlite.store import SQLiteStore

__all__ = ["Purged", "SQLiteStore"]
