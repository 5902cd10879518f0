"""The contract of a store. `plait.persistence.contract` checks every line; run it over a store of yours.

A store is read in three narrower facets, for code that needs to see a part of it only. Every `Store` is all three at
once. None of them can write: that is the whole store's business (`Store.write`), in one transaction over runs, tasks
and results, so that nobody can have one of them without the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from plait.persistence.changes import Batch
    from plait.persistence.records import (
        AttemptRecord,
        EventRecord,
        MessageRecord,
        Note,
        NoteRecord,
        RunRecord,
        TaskRecord,
    )


class RunStore(Protocol):
    """Runs: where they stand, what their policies remember (`RunRecord.policy_state`), and their history."""

    async def get_run(self, run_id: str) -> RunRecord | None:
        """The run, with its counts; `input_tokens`, `output_tokens` and `cost_usd` are summed over all attempts."""
        ...

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """The last created runs, newest first. `settings` is left empty in these."""
        ...

    async def list_events(self, run_id: str, after: int = 0, limit: int = 1000) -> tuple[EventRecord, ...]:
        """The events with a sequence number above `after`, oldest first, at most `limit`."""
        ...


class TaskStore(Protocol):
    """Tasks: what they are, where they stand, and how often they were tried."""

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        """Every task of the run in the order in which they were added."""
        ...

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        """The attempts of one task, or of the whole run, in the order in which they started."""
        ...


class ContextStore(Protocol):
    """What has been found out and said: results, which are kept with their tasks, and conversations."""

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        """Every task of the run with its result, in the order in which they were added."""
        ...

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        """The messages of one task's own conversation, oldest first; what it continues is not repeated here."""
        ...


class Store(RunStore, TaskStore, ContextStore, Protocol):
    """Keeps runs. One write method for a run's owner, `send` for all others; reads give whole records, never cursors:
    they are those of the three facets.

    Safe for many tasks of one event loop at the same time. Cancelling a call never leaves anything half-written: a
    cancelled `write` is unknown, like one that raised, and may be repeated. Every read sees all acknowledged writes.
    Errors are those of `persistence/errors.py`; a store that has to be opened says StoreNotOpen while it is not, so
    that no run is paid for that nobody keeps. An unknown run reads as None or as an empty tuple, never as an error.
    """

    async def write(self, batch: Batch) -> None:
        """Apply the whole batch or nothing, durably: when this returns, a power loss does not undo it.

        Changes already applied (by sequence number) are skipped, but only for the writer that wrote them: Fenced is
        raised, also when nothing is left to apply, unless the run's epoch is the batch's plus the number of skipped
        RunClaimed, and unless the last skipped RunClaimed carries the `owner_id` of the run's latest claim. Raises
        Conflict when a change does not follow from what is stored, when there is a gap before `first_seq`, or when
        RunCreated meets another run of that id (other `at`, settings or tasks' number).
        """
        ...

    async def send(self, run_id: str, note: Note) -> None:
        """Put a note into the run's inbox, durably. Any process may, whoever owns the run, of which nothing changes.

        A call that raised StoreError or was cancelled is unknown, and repeating it may add the note twice. Raises
        Conflict when there is no such run, or when a value cannot be stored.
        """
        ...

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        """The notes with a number above `after`, in the order in which they arrived. An owner asks every second."""
        ...


@runtime_checkable
class FilesStore(Protocol):
    """A store that has a place for files beside it. No `Store` has to be one: runs do without."""

    @property
    def files_root(self) -> Path | None:
        """The folder for them, which is made by whoever writes the first one. None where there is no place after all,
        as in a store around another one that has none.
        """
        ...


def files_root(store: object) -> Path | None:
    """The folder for files beside `store`; None where it has none."""
    return store.files_root if isinstance(store, FilesStore) else None
