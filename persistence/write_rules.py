"""The rules that decide which batch a store applies: sequence numbers, epochs, statuses and tasks. Pure.

Theory: `RunRecord.claims` has the number of every claim, so the epoch of any applied change is known. A batch of a
former owner is therefore refused even if the new owner has used the same numbers already, and a batch that its
own writer repeats is accepted, however old. A server that has lost a claim in a failover may have another one in its
place, with the same epoch: `Batch.owner_id` tells them apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plait import events
from plait.errors import Conflict, Fenced, Gap
from plait.persistence.store_records import Claim, RunRecord
from plait.statuses import RUN_DONE, RUN_TRANSITIONS, TASK_TRANSITIONS, RunStatus, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from plait.events import Event, TaskTransition
    from plait.persistence.store_records import Batch

_ONLY_RUNNING = frozenset({TaskStatus.RUNNING})
_ONLY_COMPLETED = frozenset({TaskStatus.COMPLETED})


def count_applied(batch: Batch, head: RunRecord | None) -> int:
    """Return the number of changes at the start of the batch that are applied already.

    `head` is None for an unknown run. Raises Fenced, Gap or Conflict by the rules of `Store.write`.
    """
    if not batch.events:
        return 0
    if batch.first_seq < 1:
        raise Conflict(f"run {batch.run_id!r}: changes are numbered from 1, not from {batch.first_seq}")
    created = batch.events[0] if isinstance(batch.events[0], events.RunCreated) else None
    if head is None:
        if batch.first_seq != 1 or created is None:
            absent = (
                f"run {batch.run_id!r} is not in the store; its first batch has to be written first. If an older copy "
                f"was put in the store's place, stop this run, and begin it again"
            )
            raise Conflict(absent) if batch.first_seq == 1 else Gap(absent, 1)
        if batch.epoch != 0:
            raise Conflict(f"run {batch.run_id!r} is new: its first batch is at epoch 0, not {batch.epoch}")
        return 0
    applied = min(len(batch.events), max(0, head.last_seq - batch.first_seq + 1))
    numbers = range(batch.first_seq, batch.first_seq + applied)
    claims = [
        Claim(seq, event.owner.owner_id)
        for seq, event in zip(numbers, batch.events, strict=False)
        if isinstance(event, events.RunClaimed)
    ]
    same_claims = claims == [claim for claim in head.claims if claim.seq in numbers]
    if batch.owner_id is not None and 0 < batch.epoch <= head.epoch:
        same_claims &= head.claims[batch.epoch - 1].owner_id == batch.owner_id
    if created is not None and batch.first_seq == 1:
        stored = (head.created_at, head.name, head.settings)
        if stored != (created.at, created.name, created.settings) or not same_claims:
            since = f"exists already, created at {head.created_at}"
            raise Conflict(f"run {batch.run_id!r} {since}; resume it, or choose another run id")
    missing = batch.first_seq > head.last_seq + 1
    # The missing changes may include claims of this writer.
    before = sum(claim.seq < batch.first_seq for claim in head.claims)
    if not same_claims or (batch.epoch < before if missing else batch.epoch != before):
        raise Fenced(
            f"run {batch.run_id!r} has another owner: the batch was written at epoch {batch.epoch}, "
            f"the run is at epoch {head.epoch}; do not write to the run, or resume the run to take over"
        )
    if missing:
        raise Gap(
            f"run {batch.run_id!r}: the batch starts at change {batch.first_seq}, but {head.last_seq + 1} is next; "
            "write the missing changes first. If an older copy was put in the store's place, stop this run, and resume "
            "the run in the copy",
            head.last_seq + 1,
        )
    return applied


def advance_head(head: RunRecord, change: Event, seq: int) -> RunRecord:
    """Return the head after the change; the same head if the change concerns a task only.

    Raises Conflict if the change does not follow from the head.
    """
    match change:
        case events.RunClaimed(owner=owner, lease_expires_at=expires):
            claims = *head.claims, Claim(seq, owner.owner_id)
            return replace(head, owner=owner, lease_expires_at=expires, claims=claims)
        case events.LeaseRenewed(lease_expires_at=expires):
            return replace(head, lease_expires_at=expires)
        case events.PolicyDecided():
            return replace(head, policy_state=change.state_json, policy_seq=seq)
        case events.RunCreated():
            if seq != 1:
                raise Conflict(f"run {head.run_id!r}: RunCreated can only be change 1, not change {seq}")
            return head
        case events.RunReleased() | events.RunEnded():
            if change.kind in RUN_TRANSITIONS:  # RunInterrupted and RunParked leave the status
                head = _with_status(head, change)
            return replace(head, owner=None, lease_expires_at=getattr(change, "due_at", None))
        case _:
            return _with_status(head, change) if change.kind in RUN_TRANSITIONS else head


def _with_status(head: RunRecord, change: Event) -> RunRecord:
    before, after = RUN_TRANSITIONS[change.kind]
    if head.status not in before:
        raise Conflict(f"run {head.run_id!r} is {head.status} and cannot become {after.value} by {change.kind}")
    started_at = head.started_at or (change.at if after is RunStatus.RUNNING else None)
    ended_at = change.at if after in RUN_DONE else None
    error = change.error if isinstance(change, events.RunEnded) else None
    return replace(head, status=after.value, started_at=started_at, ended_at=ended_at, error=error)


def statuses_before(change: TaskTransition) -> frozenset[TaskStatus]:
    """Return the statuses of the task from which `change` is allowed: those of TASK_TRANSITIONS, and two exceptions."""
    if isinstance(change, events.TaskCompleted) and isinstance(change.turn, str):
        # The conversation of a task that asked has more messages than a prompt and an answer.
        return _ONLY_RUNNING
    if isinstance(change, events.TaskReopened) and change.damaged:
        return _ONLY_COMPLETED
    return TASK_TRANSITIONS[change.kind].before


def mentioned_task_ids(change: events.TasksAdded) -> list[str]:
    """Return the ids of all tasks that `change` names, each once."""
    named = [upstream for task in change.tasks for upstream in task.depends_on]
    named += [task.task_id for task in change.tasks]
    return list(dict.fromkeys(named if change.added_by is None else [change.added_by, *named]))


def check_added(run_id: str, change: events.RunCreated | events.TasksAdded, stored: Collection[str]) -> None:
    """Raise Conflict if an added task exists, or if a dependency or the adding task does not exist.

    `stored` are the ids of `mentioned_task_ids` that the run has.
    """
    what = f"run {run_id!r}: {type(change).__name__}"
    new: set[str] = set()
    for task in change.tasks:
        if task.task_id in new or task.task_id in stored:
            raise Conflict(f"{what} adds task {task.task_id!r}, which the run has already")
        new.add(task.task_id)
    for task in change.tasks:
        for upstream in task.depends_on:
            if upstream not in new and upstream not in stored:
                unknown = f"depends on {upstream!r}; the run has no such task"
                raise Conflict(f"{what} adds task {task.task_id!r}, which {unknown}")
    if isinstance(change, events.TasksAdded) and change.added_by is not None and change.added_by not in stored:
        raise Conflict(f"{what} names {change.added_by!r} as the adding task; the run has no such task")


def conflict(run_id: str, change: events.TaskEvent, stored: tuple[str, int] | None) -> Conflict:
    """Return the error for a refused change.

    `stored` is the stored status and attempt of the task, or None if there is no such task.
    """
    what, task_id = f"run {run_id!r}: {type(change).__name__}", change.task_id
    if stored is None:
        return Conflict(f"{what} names task {task_id!r}, which the run does not have")
    return Conflict(
        f"{what} of task {task_id!r} (attempt {change.attempt}) does not follow: "
        f"the task is {stored[0]}, attempt {stored[1]}"
    )
