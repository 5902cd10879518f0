"""The contract of a store. `tests/contracts/store` checks every line; run the contract over a store of yours.

`RunStore`, `TaskStore` and `ContextStore` name the parts of a store that can be read. Writing is one method of the
whole store (`Store.write`), because runs, tasks and results change together in one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from plait.persistence.store_records import (
        AttemptRecord,
        Batch,
        EventRecord,
        MessageRecord,
        Note,
        NoteRecord,
        RunRecord,
        TaskRecord,
    )


class RunStore(Protocol):
    """Runs: their statuses, the states of their policies (`RunRecord.policy_state`), and their histories."""

    async def get_run(self, run_id: str) -> RunRecord | None:
        """Return the run, or None if the store has no such run."""
        ...

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """Return the last created runs, newest first, at most `limit`; none if `limit` is 0 or less.

        `settings` is empty in the records. A damaged run is listed as `damaged`, so that the others are found.
        """
        ...

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """Return runs that are queued, running or cancelling, and have no owner or an owner whose lease has expired,
        and runs that wait for a person, those without an owner only if they are due (`RunReleased.due_at`, which a run
        that waits for a person has to have): the first created, at most `limit`; none if `limit` is 0 or less.
        `settings` is empty, and no run is damaged.

        Leases are judged as in `RunRecord.lease_has_expired`: on a server, a lease has expired if the owner has written
        nothing for the length of the lease.
        """
        ...

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
    ) -> tuple[EventRecord, ...]:
        """Return the events with numbers above `after`, oldest first, at most `limit`; none if `limit` is 0 or less.

        With a `kind`, only events of the kind.
        """
        ...


class TaskStore(Protocol):
    """Tasks: their definitions, statuses and attempts."""

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        """Return the tasks of the run, in the order of adding; with `only`, that task, or those at these positions."""
        ...

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        """Return the attempts of the task, in the order of their starts; of every task if `task_id` is None."""
        ...


class ContextStore(TaskStore, Protocol):
    """Results, which are part of the tasks, and conversations."""

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        """Return the own messages of the task, oldest first, without the conversation that the task continues."""
        ...


class Store(RunStore, ContextStore, Protocol):
    """Keeps runs: `write` for the owner of a run, `send` for all other processes, and the reads of the three parts.

    Reads: return whole records, never cursors, and see all acknowledged writes. An unknown run reads as None or as an
    empty tuple, never as an error.

    Concurrency: many tasks of one event loop may call a store at the same time.

    Cancellation: a cancelled call never stores half of a batch. A cancelled `write` is unknown, like a `write` that
    raised, and may be repeated.

    Errors: only StoreError and its subclasses. A store with an opening step raises StoreNotOpen before and
    after, so that no run spends money unrecorded.
    """

    async def write(self, batch: Batch) -> None:
        """Apply the whole batch or nothing. A power loss after the return undoes nothing.

        Applied changes are skipped by their numbers, for the writer that wrote the changes. Raises Fenced for any other
        writer, even with nothing left to apply. The writer is the same if the epoch of the run equals the epoch of the
        batch plus the number of skipped RunClaimed, and if the last skipped RunClaimed has the `owner_id` of the run's
        last claim.

        Raises Gap if changes before `first_seq` are missing, and Conflict if a change does not follow from the stored
        state, or if RunCreated meets another run of the same id (another `at`, name or settings).
        """
        ...

    async def send(self, run_id: str, note: Note) -> None:
        """Add a note to the inbox of the run, durably. Any process may send, and the run does not change.

        Raises Conflict if there is no such run, or if a value cannot be stored. A call that raised another StoreError
        or was cancelled is unknown; repeating the call may add the note twice.
        """
        ...

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        """Return the notes with numbers above `after`, in the order of arrival. An owner calls every second."""
        ...


@runtime_checkable
class ServerStore(Protocol):
    """A store on a server, with one clock for all hosts, which notifies owners of notes. A `Store` need not be one.

    A server can be away for minutes, and may come back without the last changes, as a standby does that was promoted in
    time of need. The runner keeps the changes of the last minutes for such a store, and waits longer for the store at
    the end of a run.
    """

    async def wait_for_note(self, run_id: str) -> None:
        """Return when a note for the run may have arrived, after some seconds in any case. A note may be missed, so the
        owner reads its notes after each return.
        """
        ...

    async def silence(self, run_id: str) -> float:
        """Return the seconds since the last batch of the run, by the clock of the store. Raises StoreError."""
        ...


@runtime_checkable
class FilesStore(Protocol):
    """A store with a folder for files, in which backends keep files that outlive their process.

    A `Store` need not be a FilesStore: runs work without the folder.
    """

    @property
    def files_root(self) -> Path | None:
        """The folder, which the writer of the first file creates. None without a folder, as for a store around another
        store that has no folder.
        """
        ...
