"""The hosts on which attempts of a stored run were placed, read from the history of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.errors import ErrorKind
from plait.events import TaskPlaced
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord
from plait.statuses import AttemptStatus

_WITHOUT_HOST = frozenset({ErrorKind.CRASHED, ErrorKind.TIMEOUT, ErrorKind.UNAVAILABLE})
"""The kinds of errors that an attempt may have although its host reported no end."""


class PlacedAttempt(NamedTuple):
    """The place of an attempt."""

    place: str
    """The name of the host."""
    interrupted: bool
    """Whether the attempt continues an interrupted turn."""


async def placed_attempts(store: Store, run_id: str) -> dict[tuple[str, int], PlacedAttempt]:
    """Return the places by task id and number of the attempt. Raises StoreError."""
    found: dict[tuple[str, int], PlacedAttempt] = {}
    after = 0
    while page := await store.list_events(run_id, after, kind=TaskPlaced.kind):
        for event in page:
            if event.task_id is not None and event.attempt is not None:
                detail = json.loads(event.detail)
                found[event.task_id, event.attempt] = PlacedAttempt(detail["place"], detail.get("interrupted", False))
        after = page[-1].seq
    return found


async def unfinished_on_hosts(store: Store, run_id: str) -> Mapping[str, Sequence[str]]:
    """Return the ids of the tasks with attempts that may be under way, for each host that had attempts. Raises
    StoreError.

    An attempt has certainly ended if the host reported its end: an answer, a question or an error. An attempt of which
    the runner itself has stored the end may have been left on a host that was away.
    """
    placed = await placed_attempts(store, run_id)
    if not placed:
        return {}
    ended = {(one.task_id, one.attempt) for one in await store.list_attempts(run_id) if _reported_by_host(one)}
    found: dict[str, dict[str, None]] = {}
    for attempt, at in placed.items():
        on_host = found.setdefault(at.place, {})
        if attempt not in ended:
            on_host[attempt[0]] = None
    return {host: tuple(ids) for host, ids in found.items()}


def _reported_by_host(attempt: AttemptRecord) -> bool:
    if attempt.error_kind is not None:
        return attempt.error_kind not in _WITHOUT_HOST
    return AttemptStatus(attempt.status) in {AttemptStatus.COMPLETED, AttemptStatus.ASKED}
