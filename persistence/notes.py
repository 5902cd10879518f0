"""Notes to whoever owns a run. Plain frozen values, no part of the run's changes: anybody may send one."""

from __future__ import annotations

from dataclasses import dataclass

from plait.persistence.values import value


@value
class Note:
    """What somebody asks of a run's owner: `kind` says what, `task_id` of which task if of one, `body` is JSON that the
    store keeps and never reads. `at` as in `plait.persistence.changes`.
    """

    kind: str
    at: str
    task_id: str | None = None
    body: str = "{}"


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A stored note. `number` counts the notes of its run from 1, in the order in which they arrived."""

    number: int
    kind: str
    at: str
    task_id: str | None
    body: str
