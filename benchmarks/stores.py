"""The store of measured durable runs."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from plait.persistence import SQLiteStore


@asynccontextmanager
async def sqlite_store() -> AsyncIterator[SQLiteStore]:
    """Open a temporary store on the disk of the checkout; a file system in memory would give meaningless figures."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        async with SQLiteStore(Path(folder) / "plait.db") as store:
            yield store
