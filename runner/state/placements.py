"""The hosts on which attempts of a stored run were placed, read from the history of the run."""

from __future__ import annotations

import json
from typing import NamedTuple

from plait.persistence.protocol import Store
from plait.persistence.records import EventKind


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
