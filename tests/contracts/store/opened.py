"""The store under test, and the fixtures of all parts of the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from plait.persistence import Store
from tests.contracts.store.samples import OPENING, Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

Reopen: TypeAlias = Callable[[Path], AbstractAsyncContextManager[Store]]


class OpenedStore:
    """Opens the store under test."""

    def open_store(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        """Return a new, empty store, which may use the empty directory `folder`."""
        raise NotImplementedError

    def reopen_store(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        """Return the store that `open_store` made in `folder`, as another process opens the store, with all contents.

        Leave the method out for a store that ends with its process.
        """
        raise NotImplementedError

    @pytest.fixture
    def reopen(self) -> Reopen:
        if type(self).reopen_store is OpenedStore.reopen_store:
            pytest.skip("the test class has no `reopen_store`, so this store is not opened a second time")
        return self.reopen_store

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncGenerator[Store]:
        async with self.open_store(tmp_path) as store:
            yield store

    @pytest.fixture
    async def writer(self, store: Store) -> Writer:
        writer = Writer(store)
        await writer.write(*OPENING)
        return writer
