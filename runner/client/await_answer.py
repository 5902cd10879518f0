"""Waiting for the moment from which a run in `waiting_input` can continue."""

from __future__ import annotations

from plait.clock_and_ids import Clock
from plait.errors import StoreError
from plait.events import RunWaitingInput, TaskAnswered, TaskCompleted, TaskFailed, TaskSkipped
from plait.persistence.store_protocol import Store
from plait.runner.domain.asked_question import parse_time
from plait.runner.recovery.given_answers import open_questions
from plait.runner.state.stored_run import stored_run
from plait.statuses import RunStatus

_ANSWERS = frozenset({TaskAnswered.kind, TaskCompleted.kind, TaskFailed.kind, TaskSkipped.kind})
"""The events by which an answer or a decision of a person reaches a run without an owner."""


async def wait_for_answer(store: Store, run_id: str, clock: Clock, poll: float) -> bool:
    """Wait until a person has answered a task of the run, which waits, or until the deadline of a question. Return
    whether the run still waits then: another process may continue, cancel or remove the run.

    The history is read every `poll` seconds. A failed read is repeated. Raises RunNotFound, and StoreError if the run
    cannot be read at first.
    """
    run = await stored_run(store, run_id)
    deadlines = [parse_time(one.deadline_at) for one in open_questions(run) if one.deadline_at is not None]
    waits = await store.list_events(run_id, kind=RunWaitingInput.kind)
    after = waits[-1].seq if waits else 0
    while clock.wall() < min(deadlines, default=float("inf")):
        try:
            told = await store.list_events(run_id, after)
        except StoreError:
            told = ()
        if any(event.kind in _ANSWERS for event in told):
            break
        if any(event.task_id is None for event in told):
            return False  # another process has continued or ended the run
        after = told[-1].seq if told else after
        await clock.sleep(poll)
    record = await store.get_run(run_id)
    return record is not None and record.owner is None and RunStatus(record.status) is RunStatus.WAITING_INPUT
