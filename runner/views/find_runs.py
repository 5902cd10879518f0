"""The runs of a store that fit a filter, in pages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from plait.persistence.store_protocol import Store
from plait.runner.views.read_views import RunInfo, run_info
from plait.statuses import RunStatus

MOST_SEARCHED = 10_000
"""Runs that a search reads, the newest first."""


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are listed."""

    limit: int = 50
    """Runs of a page, at most."""
    offset: int = 0
    """Fitting runs before the page."""
    statuses: Collection[RunStatus] = ()
    """Shown statuses; empty for all."""
    name: str | None = None
    """The exact name; None for all."""
    search: str = ""
    """A part of the id or the name, in any case; empty for all."""

    @property
    def chooses(self) -> bool:
        """Whether a run can fail to fit."""
        return bool(self.statuses or self.search or self.name is not None)

    def fits(self, run: RunInfo) -> bool:
        """Return whether the run belongs to the list."""
        text = self.search.casefold()
        return (
            (not self.statuses or run.status in self.statuses)
            and (self.name is None or run.name == self.name)
            and (text in run.name.casefold() or text in run.run_id.casefold())
        )


async def find_runs(store: Store, chosen: RunFilter) -> tuple[RunInfo, ...]:
    """Return the page of runs. Raises StoreError.

    The shown status is not a column of the store, so a filter reads up to `MOST_SEARCHED` runs.
    """
    end = chosen.offset + chosen.limit
    records = await store.list_runs(MOST_SEARCHED if chosen.chooses else end)
    found = [info for info in (run_info(record) for record in records) if chosen.fits(info)]
    return tuple(found[chosen.offset : end])
