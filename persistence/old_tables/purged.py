"""The effect of a purge."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Purged:
    """The effect of `SQLiteStore.purge` or `PostgresStore.purge`."""

    run_ids: tuple[str, ...]
    """The deleted runs, without unknown ids."""
    freed_bytes: int
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """None if no byte of the deleted runs is left in the store. Else one line with the reason.

    Another purge, with the same ids or with none, removes the rest.
    """
