"""What all tests share: an environment without keys, and a store."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from persistence import MemoryStore, SQLiteStore, Store

# A developer's own keys, servers and proxies must not reach a test, nor a test them.
PRIVATE = ("OPENAI_", "ANTHROPIC_", "PLAIT_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

# Told to write no bytecode, each of the hundreds of commands that the tests start would compile all of ours again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PRIVATE) or name.upper() in PROXIES:
            monkeypatch.delenv(name)


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        yield store


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Store]:
    """Each of our stores in turn."""
    if request.param == "memory":
        yield MemoryStore()
        return
    async with SQLiteStore(tmp_path / "plait.db") as sqlite_store:
        yield sqlite_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a database may be, with every character that a URI would take amiss; its folder does not exist yet."""
    return tmp_path / "a folder" / "runs #1 100% ?x=y.db"


@pytest.fixture(params=["memory", "sqlite", "none"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Store | None]:
    """Each of our stores in turn, and no store at all."""
    if request.param == "sqlite":
        async with SQLiteStore(tmp_path / "plait.db") as sqlite_store:
            yield sqlite_store
        return
    yield MemoryStore() if request.param == "memory" else None
