"""A store that is given as an address: opened while calls use it, and closed with the last of them."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import anyio

from plait.persistence.store_protocol import Store
from plait.safe_text import SCHEMES

if TYPE_CHECKING:
    from plait.persistence.postgres_store import PostgresStore
    from plait.persistence.sqlite_store import SQLiteStore

StorePlace: TypeAlias = "Store | str | os.PathLike[str]"
"""A store, the path of a SQLite file, or the address of a PostgreSQL database (`postgresql://user@host/database`)."""
P = ParamSpec("P")
T = TypeVar("T")


class OwnStore:
    """The store at `place`. A store that is no address is opened and closed by its owner, and `opened` does nothing."""

    def __init__(self, place: StorePlace | None) -> None:
        self._own = _store_at(place) if isinstance(place, str | os.PathLike) else None
        self.store: Store | None = self._own or cast("Store | None", place)
        self._users = 0
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Keep the store open inside the block. Blocks may overlap. Raises StoreUnusable."""
        if self._own is None:
            yield
            return
        async with self._lock:
            if not self._users:
                await self._own.__aenter__()
            self._users += 1
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._lock:
                    self._users -= 1
                    if not self._users:
                        await self._own.close()


class UsesStore(Protocol):
    """An object with a store that may be its own."""

    own_store: OwnStore


Self = TypeVar("Self", bound=UsesStore)


def with_open_store(
    method: Callable[Concatenate[Self, P], Awaitable[T]],
) -> Callable[Concatenate[Self, P], Awaitable[T]]:
    """Keep the store of the object open during each call of `method`."""

    @wraps(method)
    async def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async with self.own_store.opened():
            return await method(self, *args, **kwargs)

    return call


def _store_at(place: str | os.PathLike[str]) -> SQLiteStore | PostgresStore:
    if isinstance(place, str) and place.startswith(SCHEMES):
        from plait.persistence.postgres_store import PostgresStore  # noqa: PLC0415 - of an extra

        return PostgresStore(place)
    from plait.persistence.sqlite_store import SQLiteStore  # noqa: PLC0415 - not needed by every run

    return SQLiteStore(place)
