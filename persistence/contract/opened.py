"""The store under test, as each part of the contract gets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from plait.persistence import Store
from plait.persistence.contract.samples import OPENING, Writer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

Reopen: TypeAlias = Callable[[Path], AbstractAsyncContextManager[Store]]


class OpenedStore:
    """Opens the store under test."""

    def open_store(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        """A new, empty store; `folder` is an empty directory that it may use."""
        raise NotImplementedError

    def reopen_store(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        """The store that `open_store` made of this `folder`, as another process opens it: with all that is in it. Leave
        this out for a store that is gone with its process.
        """
        raise NotImplementedError

    @pytest.fixture
    def reopen(self) -> Reopen:
        if type(self).reopen_store is OpenedStore.reopen_store:
            pytest.skip("this store is not opened a second time; say how with `reopen_store`")
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
