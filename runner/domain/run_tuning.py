"""What a person changes in a run that goes on: pauses, how many tasks run at once, a task that runs again. Pure.

Each pause and each number is a note in the inbox of the run, and all of them together, the last one of a kind counting,
are its `Tuning`. So a change holds for every later owner too, whether or not the run had one when it was sent. The
event `RunTuned`, of the same form, tells the history when an owner took it over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TypeAlias

from plait.errors import InvalidRequest
from plait.events import RunTuned
from plait.json_form import as_json, from_json, parsed_object, to_json, value
from plait.persistence.store_records import Note, NoteRecord
from plait.runner.domain.dag import DAG
from plait.task import FailureMode, Task

TUNE = "tune"
"""The kind of note that tunes a run."""
MOST_SLOTS = 10_000
"""The most tasks that a person may ask to run at once."""
_AT = frozenset({"at"})
_Of: TypeAlias = tuple[str | None, bool]
"""What a change is about: a backend, None for the run, and whether its slots or its pause."""


@value
class Tuning:
    """The changes that hold for a run."""

    changes: Mapping[_Of, RunTuned] = field(default_factory=dict[_Of, RunTuned])
    """The last change of each kind, `at` when it was asked for."""

    @classmethod
    def of(cls, notes: Iterable[NoteRecord]) -> Tuning:
        """Return the tuning of a run with `notes`."""
        return cls().after(filter(None, map(tuned_in, notes)))

    def after(self, changes: Iterable[RunTuned]) -> Tuning:
        """Return the tuning after further changes."""
        last = dict(self.changes)
        for one in changes:
            last[one.backend, one.paused is None] = one
        return Tuning(last)

    @property
    def in_force(self) -> tuple[RunTuned, ...]:
        """The changes without the pauses that are over."""
        return tuple(one for one in self.changes.values() if one.paused is not False)

    @property
    def slots(self) -> dict[str | None, int]:
        """The number of tasks at once by backend, None for the run."""
        return {one.backend: one.slots for one in self.changes.values() if one.slots is not None}

    def pause_of(self, backend: str) -> RunTuned | None:
        """Return why nothing starts on `backend`: the pause of the run, or that of the backend."""
        pauses = (self.changes.get((name, False)) for name in (None, backend))
        return next((one for one in pauses if one is not None and one.paused), None)

    def news_since(self, before: Tuning) -> list[RunTuned]:
        """Return what is different from `before`."""
        earlier = {of: _says(one) for of, one in before.changes.items()}
        return [one for of, one in self.changes.items() if _says(one) != earlier.get(of, (False, None))]


def _says(change: RunTuned) -> tuple[bool, int | None]:
    return bool(change.paused), change.slots


RETRY = "retry"
"""The kind of note that asks to run a task again."""


def retry_note(task_id: str, attempt: int, at: str) -> Note:
    """Return the note that asks for another attempt."""
    return Note(RETRY, at, task_id, to_json({"attempt": attempt}))


def retry_in(note: NoteRecord) -> tuple[str, int] | None:
    """Return the task that `note` asks to run again, which has failed or waits for its next attempt, and the last
    attempt that the sender knows of: the request is void once there is a later one. None if it is of another kind or
    cannot be decoded.
    """
    if note.kind != RETRY or note.task_id is None:
        return None
    try:
        return note.task_id, int(json.loads(note.body)["attempt"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def why_not_again(dag: DAG, task: Task) -> str | None:
    """Return why the failed task cannot run again while its run goes on; None if it can."""
    if task.gathers:
        return "it has parts; name one of them"
    if task.failure_mode is not FailureMode.HARD:
        return "the tasks after it have continued without it"
    if any(one.join != "all" or one.call is not None for one in dag):
        return "the plan has tasks with `join` or `plan`, which may have continued without it"
    return None


def checked_change(change: RunTuned) -> RunTuned:
    """Return `change`. Raises InvalidRequest for a number of slots that is out of range."""
    if change.slots is not None and not 1 <= change.slots <= MOST_SLOTS:
        raise InvalidRequest(f"the number of tasks at once must be 1 to {MOST_SLOTS:,}, not {change.slots}")
    return change


def tune_note(change: RunTuned) -> Note:
    """Return the note that asks for `change`."""
    return Note(TUNE, change.at, body=to_json(as_json(change, _AT)))


def tuned_in(note: NoteRecord) -> RunTuned | None:
    """Return the change that `note` asks for; None if it is of another kind or cannot be decoded."""
    if note.kind != TUNE:
        return None
    try:
        change = from_json(RunTuned, {**parsed_object(note.body), "at": note.at})
        return checked_change(change) if (change.paused is None) is not (change.slots is None) else None
    except (ValueError, RecursionError, InvalidRequest):
        return None
