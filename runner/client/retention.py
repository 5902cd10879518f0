"""Deletion of runs that ended long ago: which runs go, and what is removed with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from plait.clock_and_ids import iso, parse_time
from plait.errors import Conflict, Fenced, PlaitError
from plait.events import RunReleased
from plait.json_form import value
from plait.persistence.delete_runs import Purged
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch, RunRecord
from plait.runner.engine.lease import owner_is_gone
from plait.runner.reuse.earlier_answers import ReuseFrom
from plait.runner.state.attempt_files import delete_files, has_sessions
from plait.runner.state.stored_run import read_settings
from plait.statuses import RUN_DONE, RunStatus

_ALL = 1 << 31


@runtime_checkable
class PurgingStore(Store, Protocol):
    """A store that deletes runs, as `SQLiteStore` and `PostgresStore`."""

    @property
    def files_root(self) -> Path | None: ...
    async def run_sizes(self) -> dict[str, int]: ...
    async def purge(self, run_ids: Collection[str]) -> Purged: ...
    async def session_ids(self) -> set[str]: ...


@value
class Deletion:
    """The runs that `Runs.delete` has deleted, or would delete."""

    runs: Sequence[RunRecord]
    sizes: Mapping[str, int]
    """The bytes of text of each run of the store, by run id."""
    kept: int
    """The number of runs that stay."""
    freed_bytes: int = 0
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """Why something of the deleted runs is left in the store or beside it, in one line; another call removes it."""


async def delete_expired(
    store: Store, now: float, *, keep: int | None, older_than: float | None, dry_run: bool
) -> Deletion:
    """Delete the runs that have expired at Unix time `now`: see `Runs.delete`."""
    if not isinstance(store, PurgingStore):
        raise PlaitError(f"a {type(store).__name__} deletes no runs; use a SQLiteStore or a PostgresStore")
    runs = [await _released(store, run, now, dry_run) for run in await store.list_runs(_ALL)]
    needed = await earlier_runs_needed(store, runs)
    old = [run for run in expired(runs, now, keep, older_than) if run.run_id not in needed]
    sizes = await store.run_sizes()
    deletion = Deletion(old, sizes, len(runs) - len(old))
    if dry_run:
        return deletion
    # Also without expired runs: an earlier purge may have left pages to wipe.
    purged = await store.purge([run.run_id for run in old])
    sessions = await store.session_ids() if has_sessions(store.files_root) else None
    stored = {run.run_id for run in runs}.difference(purged.run_ids)
    files = await delete_files(store.files_root, purged.run_ids, stored, sessions)
    remains = "; ".join(filter(None, (purged.remains, files))) or None
    return replace(deletion, freed_bytes=purged.freed_bytes, remains=remains)


async def _released(store: Store, run: RunRecord, now: float, dry_run: bool) -> RunRecord:
    """Return an ended run without its owner if the owner died, as after a killed `plait continue`. A dry run changes
    the returned value alone, not the store.
    """
    if RunStatus(run.status) not in RUN_DONE or run.owner is None or not owner_is_gone(run):
        return run
    if not dry_run:
        try:
            leaving = (RunReleased(iso(now)),)
            await store.write(Batch(run.run_id, run.epoch, run.last_seq + 1, leaving, run.owner.owner_id))
        except (Conflict, Fenced):  # another process has just claimed the run
            return run
    return replace(run, owner=None)


def expired(
    runs: Iterable[RunRecord], now: float, keep: int | None = None, older_than: float | None = None
) -> list[RunRecord]:
    """Return the runs to delete at Unix time `now`, from `runs` sorted newest first: see `Runs.delete`.

    Never selects an unfinished run, a damaged run, or a run with an owner, for example during the continuation of a
    conversation.
    """
    if keep is None and older_than is None:
        return []
    ended = [run for run in runs if RunStatus(run.status) in RUN_DONE and not run.damaged]
    free = [run for run in ended[keep or 0 :] if run.owner is None]
    if older_than is None:
        return free
    return [run for run in free if now - parse_time(run.ended_at or run.created_at) >= older_than]


async def earlier_runs_needed(store: Store, runs: Iterable[RunRecord]) -> set[str]:
    """Return the runs whose answers an unfinished run among `runs` may still take over. Raises StoreError."""
    needed: set[str] = set()
    for run in runs:
        if RunStatus(run.status) not in RUN_DONE and (whole := await store.get_run(run.run_id)) is not None:
            reuse = ReuseFrom.of_settings(read_settings(whole))
            needed |= set() if reuse is None else {reuse.like}
    return needed
