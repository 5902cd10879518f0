"""The runs of a store that go on by themselves, with nobody there: those that park.

Such a run is due once its time has come, which is the time until which it is parked or the deadline of a question; at
once after an answer; and after the death of its process. All other runs wait for a person, or for a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.events import RunParked
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.engine.lease import due_at
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED, PARK, read_settings


class DueRuns:
    """Finds the due runs of `store`, again and again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parks: dict[tuple[str, int], bool] = {}
        """Whether a run parks, by its id and epoch: its settings are read once."""

    async def find(self, now: float) -> Sequence[RunRecord]:
        """Return the runs that are due at Unix time `now`, the first created first. Raises StoreError."""
        found = await self._store.list_claimable(MOST_RUNS_SEARCHED)
        return [run for run in found if await self._is_due(run, now)]

    async def _is_due(self, run: RunRecord, now: float) -> bool:
        if run.owner is None and ((due := due_at(run)) is None or due > now):
            return False  # not begun, stopped by a person, or due by the store's clock alone
        key = run.run_id, run.epoch
        if key not in self._parks:
            whole = await self._store.get_run(run.run_id)
            self._parks[key] = whole is not None and bool(
                read_settings(whole).get(PARK) or await self._store.list_events(run.run_id, 0, 1, RunParked.kind)
            )
        return self._parks[key]
