"""Where the durable runs that are measured are written."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from plait.persistence import SQLiteStore


@asynccontextmanager
async def sqlite_store() -> AsyncIterator[SQLiteStore]:
    """A store on the disk of the checkout: figures from a memory file system would say nothing."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        async with SQLiteStore(Path(folder) / "plait.db") as store:
            yield store
