"""Which runs may be deleted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from plait.persistence.records import RunRecord
from plait.runner.domain.status import RUN_DONE, RunStatus


@dataclass(frozen=True, slots=True)
class Expiry:
    """When an ended run has been kept for long enough: not among the newest `keep` ended ones, and `older_than` seconds
    after its end. None: that does not count; with both None nothing expires.
    """

    keep: int | None = None
    older_than: float | None = None


def expired(runs: Iterable[RunRecord], expiry: Expiry, now: float) -> list[RunRecord]:
    """Those of `runs`, newest first, that `expiry` is met for at Unix time `now`. Never one that has not ended, and
    never one with an owner, as while somebody goes on with a conversation of it.
    """
    if expiry == Expiry():
        return []
    ended = [run for run in runs if RunStatus(run.status) in RUN_DONE]
    return [run for run in ended[expiry.keep or 0 :] if run.owner is None and _is_older(run, expiry.older_than, now)]


def _is_older(run: RunRecord, seconds: float | None, now: float) -> bool:
    return seconds is None or now - datetime.fromisoformat(run.ended_at or run.created_at).timestamp() >= seconds
