"""Selection of the runs that may be deleted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.reuse.earlier_answers import ReuseFrom
from plait.statuses import RUN_DONE, RunStatus


@dataclass(frozen=True, slots=True)
class Expiry:
    """Conditions for the deletion of an ended run; all conditions given must hold. Without any, nothing expires."""

    keep: int | None = None
    """The number of the newest ended runs to keep; None for no such condition."""
    older_than: float | None = None
    """The minimum age since the end, in seconds; None for no such condition."""


def expired(runs: Iterable[RunRecord], expiry: Expiry, now: float) -> list[RunRecord]:
    """Return the runs to delete at Unix time `now`, from `runs` sorted newest first.

    Never selects an unfinished run, a damaged run, or a run with an owner, for example during the continuation of a
    conversation.
    """
    if expiry == Expiry():
        return []
    ended = [run for run in runs if RunStatus(run.status) in RUN_DONE and not run.damaged]
    return [run for run in ended[expiry.keep or 0 :] if run.owner is None and _is_older(run, expiry.older_than, now)]


async def earlier_runs_needed(store: Store, runs: Iterable[RunRecord]) -> set[str]:
    """Return the runs whose answers an unfinished run among `runs` may still take over. Raises StoreError."""
    needed: set[str] = set()
    for run in runs:
        if RunStatus(run.status) not in RUN_DONE and (whole := await store.get_run(run.run_id)) is not None:
            reuse = ReuseFrom.of_settings(json.loads(whole.settings))
            needed |= set() if reuse is None else {reuse.like}
    return needed


def _is_older(run: RunRecord, seconds: float | None, now: float) -> bool:
    return seconds is None or now - datetime.fromisoformat(run.ended_at or run.created_at).timestamp() >= seconds
