"""The store under test, as each part of the contract gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from persistence.contract.samples import OPENING, Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from persistence import Store


class OpenedStore:
    """Opens the store under test."""

    def open_store(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        """A new, empty store; `folder` is an empty directory that it may use."""
        raise NotImplementedError

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncGenerator[Store]:
        async with self.open_store(tmp_path) as store:
            yield store

    @pytest.fixture
    async def writer(self, store: Store) -> Writer:
        writer = Writer(store)
        await writer.write(*OPENING)
        return writer
