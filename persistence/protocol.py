"""The contract of a store. `persistence.contract` checks every line; run it over a store of yours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from persistence.changes import Batch
    from persistence.notes import Note, NoteRecord
    from persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord


class Store(Protocol):
    """Keeps runs. One write method for a run's owner, `send` for all others; reads give whole records, never cursors.

    Safe for many tasks of one event loop at the same time. Cancelling a call never leaves anything half-written: a
    cancelled `write` is unknown, like one that raised, and may be repeated. Every read sees all acknowledged writes.
    Errors are those of `persistence.errors`. An unknown run reads as None or as an empty tuple, never as an error.
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

    async def get_run(self, run_id: str) -> RunRecord | None:
        """The run, with its counts and its usage summed over all attempts."""
        ...

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """The last created runs, newest first. `settings` is left empty in these."""
        ...

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        """Every task of the run in the order in which they were added."""
        ...

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        """The attempts of one task, or of the whole run, in the order in which they started."""
        ...

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        """The messages of one task's own conversation, oldest first; what it continues is not repeated here."""
        ...

    async def list_events(self, run_id: str, after: int = 0, limit: int = 1000) -> tuple[EventRecord, ...]:
        """The events with a sequence number above `after`, oldest first, at most `limit`."""
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
