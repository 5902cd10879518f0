"""Runs in a PostgreSQL database, through asyncpg."""

from __future__ import annotations

from plait.persistence.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
