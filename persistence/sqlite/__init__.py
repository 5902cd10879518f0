"""The SQLite store."""

from plait.persistence.sqlite.purge import Purged
from plait.persistence.sqlite.store import SQLiteStore

__all__ = ["Purged", "SQLiteStore"]
