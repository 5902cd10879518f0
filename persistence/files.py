"""Files beside a store: what a run's backends write there outlives their process, as the store does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path


@runtime_checkable
class FilesStore(Protocol):
    """A store that has a place for files beside it. No `Store` has to be one: runs do without."""

    @property
    def files_root(self) -> Path | None:
        """The folder for them, which is made by whoever writes the first one. None where there is no place after all,
        as in a store around another one that has none.
        """
        ...


def files_root(store: object) -> Path | None:
    """The folder for files beside `store`; None where it has none."""
    return store.files_root if isinstance(store, FilesStore) else None
