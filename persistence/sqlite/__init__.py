"""The SQLite store."""

from persistence.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]
