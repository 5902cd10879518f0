"""The contract of a store. `plait.persistence.contract` checks every line; run it over a store of yours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from plait.persistence.facets import ContextStore, RunStore, TaskStore

if TYPE_CHECKING:
    from plait.persistence.batch import Batch
    from plait.persistence.notes import Note, NoteRecord


class Store(RunStore, TaskStore, ContextStore, Protocol):
    """Keeps runs. One write method for a run's owner, `send` for all others; reads give whole records, never cursors:
    they are those of the three facets (`plait.persistence.facets`).

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
