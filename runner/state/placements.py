"""The hosts on which attempts of a stored run were placed, read from the history of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plait.persistence.protocol import Store
from plait.persistence.records import EventKind
from plait.runner.domain.status import TASK_STATUSES, TaskStatus


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
    while page := await store.list_events(run_id, after, kind=EventKind.TASK_PLACED):
        for event in page:
            if event.task_id is not None and event.attempt is not None:
                detail = json.loads(event.detail)
                found[event.task_id, event.attempt] = PlacedAttempt(detail["place"], detail.get("interrupted", False))
        after = page[-1].seq
    return found


async def unfinished_on_hosts(store: Store, run_id: str) -> Mapping[str, Sequence[str]]:
    """Return the ids of the tasks with attempts that may be under way, by host. Raises StoreError.

    Only the last attempt of a completed task has certainly ended: an earlier one, or one of a task that was cancelled,
    may have been left on a host that was away.
    """
    placed = await placed_attempts(store, run_id)
    ended: set[tuple[str, int]] = set()
    if placed:
        tasks = await store.list_tasks(run_id)
        ended = {(one.task_id, one.attempt) for one in tasks if TASK_STATUSES[one.status] is TaskStatus.COMPLETED}
    found: dict[str, dict[str, None]] = {}
    for attempt, at in placed.items():
        if attempt not in ended:
            found.setdefault(at.place, {})[attempt[0]] = None
    return {host: tuple(ids) for host, ids in found.items()}
