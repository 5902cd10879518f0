"""An empty PostgreSQL database, and a store in it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from plait.persistence import PostgresStore
from tests.support.stores.postgres import address, empty, end_server, start_server, worker_dsn


@pytest.fixture
async def dsn() -> str:
    dsn = await asyncio.to_thread(worker_dsn)
    await empty(dsn)
    return dsn


@pytest.fixture
async def store(dsn: str) -> AsyncGenerator[PostgresStore]:
    async with PostgresStore(dsn) as store:
        yield store


@pytest.fixture
def own_server() -> Iterator[tuple[str, object]]:
    """Yield the address of a server of this test, whose commits are durable."""
    with tempfile.TemporaryDirectory(prefix="plait-postgres-") as folder:
        server = start_server(Path(folder) / "data")
        try:
            yield address(server), server
        finally:
            end_server(server)
