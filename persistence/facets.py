"""A store, read in three narrower facets: for code that needs to see a part of it only.

Every `Store` is all three at once. None of them can write: that is the whole store's business (`Store.write`), in one
transaction over runs, tasks and results, so that nobody can have one of them without the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from plait.persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord


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
