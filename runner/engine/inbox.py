"""The notes that other processes send to a run's owner.

A request to cancel carries the number of the run's last change that its sender had seen. If the run has ended since,
the request came too late and is void: it must not cancel a run that a person has reopened. No clocks are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from plait.backends.protocol import JsonValue
from plait.persistence.errors import StoreError
from plait.persistence.protocol import Store
from plait.persistence.records import RUN_ENDS, Note, NoteRecord, RunRecord
from plait.runner.clock import Clock
from plait.runner.domain.status import RUN_DONE, RunStatus
from plait.runner.errors import PlaitError
from plait.runner.log import logger
from plait.runner.state.codec import to_json

LOOK_EVERY_S = 1.0
"""How often an owner looks into its run's inbox."""
CANCEL = "cancel"
"""The kind of note that asks for the run to be cancelled for good."""

ANSWER = "answer"
"""The kind of note that answers the question of a task."""


def cancel_note(record: RunRecord, at: str) -> Note:
    """The request to cancel the run as `record` shows it."""
    return Note(CANCEL, at, body=to_json({"seq": record.last_seq}))


async def is_to_be_cancelled(store: Store, record: RunRecord) -> bool:
    """Whether the run has not ended, and somebody has asked for it to be cancelled. Raises StoreError."""
    status = RunStatus(record.status)
    if status in RUN_DONE or status is RunStatus.CANCELLING:
        return status is RunStatus.CANCELLING
    return await _asks_for_cancel(store, record.run_id, await store.list_notes(record.run_id))


AnswerHandler: TypeAlias = Callable[[str, int, JsonValue, str], bool]
"""Takes an answer: the task, the attempt that asked, the value, and who gave it."""


class Inbox:
    """The inbox of a run, as its owner reads it. The store is let alone while it is `away`. That it cannot be read is
    no reason to end a run: it is asked again.
    """

    def __init__(
        self, store: Store, run_id: str, clock: Clock, away: Callable[[], bool], answer: AnswerHandler
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._away = away
        self._answer = answer
        self._after = 0
        self._complained = False

    async def handle(self) -> None:
        """Pass answers on as they come in, and return once somebody has asked for the run, which goes on, to be
        cancelled.
        """
        while True:
            await self._clock.sleep(LOOK_EVERY_S)
            notes = await self._new_notes()
            try:
                if await _asks_for_cancel(self._store, self._run_id, notes):
                    return
            except StoreError as error:
                self._complain(error)
                continue
            self._after = notes[-1].number if notes else self._after
            for note in filter(None, map(answer_in, notes)):
                self._pass_on(note)

    async def look_for_answer(self, task_id: str, attempt: int, deadline_at: str) -> None:
        """Pass on what came by `deadline_at` in answer to that attempt, and has not been seen yet."""
        for note in filter(None, map(answer_in, await self._new_notes())):
            if (note.task_id, note.attempt) == (task_id, attempt) and note.at <= deadline_at:
                self._pass_on(note)

    async def _new_notes(self) -> Sequence[NoteRecord]:
        if self._away():
            return ()
        try:
            return await self._store.list_notes(self._run_id, self._after)
        except StoreError as error:
            self._complain(error)
            return ()

    def _complain(self, error: StoreError) -> None:
        if not self._complained:
            logger(run=self._run_id).warning("inbox_not_read", error=str(error))
        self._complained = True

    def _pass_on(self, note: AnswerNote) -> None:
        try:
            self._answer(note.task_id, note.attempt, note.value, "person")
        except PlaitError as error:
            logger(run=self._run_id).warning("answer_refused", task=note.task_id, error=str(error))


@dataclass(frozen=True, slots=True)
class AnswerNote:
    """An answer in the inbox: to the question with which `attempt` of the task ended. `nonce` tells two alike apart."""

    task_id: str
    attempt: int
    value: JsonValue
    at: str
    nonce: str


def answer_note(answer: AnswerNote) -> Note:
    """The note that brings `answer`."""
    body = to_json({"attempt": answer.attempt, "value": answer.value, "nonce": answer.nonce})
    return Note(ANSWER, answer.at, answer.task_id, body)


def answer_in(note: NoteRecord) -> AnswerNote | None:
    """The answer that `note` brings; None where it brings none that can be read."""
    if note.kind != ANSWER or note.task_id is None:
        return None
    try:
        body = json.loads(note.body)
        return AnswerNote(note.task_id, int(body["attempt"]), body["value"], note.at, str(body["nonce"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


async def _asks_for_cancel(store: Store, run_id: str, notes: Sequence[NoteRecord]) -> bool:
    seen = max((_seen(note) for note in notes if note.kind == CANCEL), default=None)
    return seen is not None and not await _ended_since(store, run_id, seen)


def _seen(note: NoteRecord) -> int:
    """The last change that the sender knew of; 0 where the note does not say."""
    try:
        return int(json.loads(note.body)["seq"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0


async def _ended_since(store: Store, run_id: str, seq: int) -> bool:
    while events := await store.list_events(run_id, seq):
        if any(event.kind in RUN_ENDS for event in events):
            return True
        seq = events[-1].seq
    return False
