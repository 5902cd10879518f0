"""An empty PostgreSQL database, and a store in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from plait.persistence import PostgresStore
from tests.support.stores.postgres import empty, worker_dsn


@pytest.fixture
async def dsn() -> str:
    dsn = await asyncio.to_thread(worker_dsn)
    await empty(dsn)
    return dsn


@pytest.fixture
async def store(dsn: str) -> AsyncGenerator[PostgresStore]:
    async with PostgresStore(dsn) as store:
        yield store
