"""Who added which task of a stored run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord

POLICY = "the policy"


async def adders(store: Store, run: RunRecord, tasks: Sequence[TaskRecord]) -> dict[str, str]:
    """By the id of each task that was added: the id of the task that did it, or `POLICY`."""
    by_policy = await _added_by_policy(store, run) if run.policy_state is not None else set[int]()
    found = {task.task_id: POLICY if task.position in by_policy else task.added_by for task in tasks}
    return {task_id: by for task_id, by in found.items() if by is not None}


async def _added_by_policy(store: Store, run: RunRecord) -> set[int]:
    """Tasks say which task added them; that a policy did, only the run's history says."""
    positions: set[int] = set()
    end = after = 0
    while page := await store.list_events(run.run_id, after):
        for event in page:
            if event.kind in {"run_created", "tasks_added"}:
                start, end = end, end + json.loads(event.detail)["tasks"]
                if event.kind == "tasks_added" and event.task_id is None:
                    positions.update(range(start, end))
        after = page[-1].seq
    return positions
