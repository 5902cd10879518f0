"""Write one batch: one statement where the batch only adds rows, else one transaction.

Theory: a `CachedRun` holds the head and the statuses as of the owner's last batch. The next batch is applied to the
cached run, and the statement updates the stored head only if the head still has the cached epoch and last change. So
the fence, the rows and the commit are one round trip, and READ COMMITTED is enough. No row back means that the cached
run is outdated: the exact way locks and reads the head, and `rules.count_applied` decides. A failed or cut batch drops
the cached run.

A statement cannot change a row that it adds, so batches that change rows take a transaction, with the same guard.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from plait.persistence.postgres.connection import escaped
from plait.persistence.postgres.listener import CHANNEL, payload

from plait.persistence import rules
from plait.persistence.changes import RunClaimed, RunCreated, RunReleased, TasksAdded
from plait.persistence.errors import Conflict
from plait.persistence.failpoints import SENT, reached
from plait.persistence.old_tables import kinds
from plait.persistence.old_tables.apply import OF_TASKS, ChangeApplier
from plait.persistence.old_tables.checksum import content_checksum, message_checksum
from plait.persistence.old_tables.originals import Originals, named_attempts, named_runs
from plait.persistence.old_tables.pieces import cut_settings
from plait.persistence.old_tables.rows import BatchRows, run_columns
from plait.persistence.old_tables.task_cache import TaskCache
from plait.persistence.postgres import statements as sql
from plait.persistence.postgres.reader import read_head
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plait.persistence.postgres.connection import Connection

    from plait.persistence.changes import Batch, Change
    from plait.persistence.records import Note
    from plait.persistence.rules import RunHead


class PrefetchedTasks(TaskCache):
    """The task cache of a run in PostgreSQL. `prefetch` reads what a batch needs before the batch is applied."""

    def __init__(self, run_id: str, number: int, next_task: int | None = None) -> None:
        super().__init__(None, run_id, number)
        self._next = next_task
        self._has_all = next_task is not None
        self._misses = 0

    def needed(self, changes: Sequence[Change]) -> set[str]:
        """Return the ids of the tasks of the changes that are not in the cache."""
        named: set[str] = {task_id for one in changes if (task_id := getattr(one, "task_id", None))}
        for one in changes:
            if isinstance(one, TasksAdded):
                named.update(rules.mentioned_task_ids(one))
        return named - self.tasks.keys()

    async def prefetch(self, connection: Connection, changes: Sequence[Change]) -> None:
        """Read the tasks of the changes, and the number of the next task if the changes add tasks."""
        missing = self.needed(changes)
        if missing:
            self._misses += 1
            if self._misses > 1 and not self._has_all:  # a run goes on: the other tasks follow
                self._has_all = True
                self._note(await connection.fetch(sql.FIND_OPEN_TASKS, self.run_id))
                missing = self.needed(changes)
        if missing:
            self._note(await connection.fetch(sql.FIND_TASKS, self.run_id, list(map(escaped, missing))))
        if self._next is None and any(isinstance(one, TasksAdded) for one in changes):
            found = await connection.fetchval(sql.NEXT_TASK, self.number)
            self._next = self.base if found is None else found

    def _note(self, rows: Iterable[Any]) -> None:
        for task_id, position, status, attempt, started_seq in rows:
            self.tasks.setdefault(task_id, (self.base | position, status, attempt, self.base | (started_seq or 0)))

    def read_tasks(self, task_ids: set[str]) -> Iterable[tuple[str, int, str, int, int | None]]:  # noqa: ARG002
        return ()  # `prefetch` has read every task of the batch

    def read_next_task(self) -> int:
        assert self._next is not None
        return self._next


@dataclass(slots=True)
class CachedRun:
    """A run after its last batch."""

    head: RunHead
    usage: Usage
    tasks: PrefetchedTasks

    @property
    def number(self) -> int:
        return self.tasks.number

    def is_next(self, batch: Batch) -> bool:
        """Return whether the batch continues the run from here, without a claim."""
        return (
            batch.epoch == self.head.epoch
            and batch.first_seq == self.head.last_seq + 1
            and len(batch.changes) > 0
            and not any(isinstance(one, (RunCreated, RunClaimed)) for one in batch.changes)
        )


RunCache = dict[str, CachedRun]
"""The runs that are being written, by run id."""
_HAND_OVER: Final = {kinds.SET_PROMPTS: sql.HAND_OVER_TASKS, kinds.DISCARD_RESULTS: sql.HAND_OVER_ANSWERS}
"""The statement that moves the texts of a row to a copy before the row changes, by the kind of the change."""


@dataclass(slots=True)
class BatchCounts:
    """The batches that a store has written."""

    all: int = 0
    single: int = 0
    """The batches that were one round trip."""


async def write_batch(connection: Connection, batch: Batch, cache: RunCache, counts: BatchCounts) -> None:
    """Apply the changes that are not applied yet, all or nothing. Raises Fenced, Conflict, or an error of asyncpg."""
    run = cache.pop(batch.run_id, None)
    counts.all += 1
    is_next = run is not None and run.is_next(batch) and not _takes_over(batch.changes)
    if run is None or not is_next or not await _write_next(connection, batch, run, counts):
        run = await _write_exactly(connection, batch)
    if run is not None and not isinstance(batch.changes[-1], RunReleased):
        cache[batch.run_id] = run


def _takes_over(changes: Sequence[Change]) -> bool:
    """Return whether rows of the changes may refer to rows of other runs, which are read first, under a lock."""
    return bool(named_runs(changes) or named_attempts(changes))


async def _read_originals(connection: Connection, changes: Sequence[Change]) -> Originals:
    """Return the stored rows to which the rows of the changes may refer."""
    originals = Originals()
    for run_id in named_runs(changes):
        originals.add_tasks(run_id, await connection.fetch(sql.LIST_ORIGINAL_TASKS, run_id))
    if attempts := named_attempts(changes):
        run_ids, task_ids, numbers = zip(*attempts, strict=True)
        names = list(map(escaped, run_ids)), list(map(escaped, task_ids))
        originals.add_answers(await connection.fetch(sql.FIND_ORIGINAL_ANSWERS, *names, list(numbers)))
    return originals


async def _write_next(connection: Connection, batch: Batch, run: CachedRun, counts: BatchCounts) -> bool:
    """Write the batch that continues the cached run. Return False, with nothing written, if that run is outdated."""
    looks_up = bool(run.tasks.needed(batch.changes)) or any(isinstance(one, TasksAdded) for one in batch.changes)
    if looks_up:
        await run.tasks.prefetch(connection, batch.changes)
    before = run.head
    rows = _apply(run, batch.run_id, batch.first_seq, batch.changes, Originals())
    reached("txn.begun")
    if _only_adds(rows):
        added = tuple(kind for kind in sql.ONLY_ADDED if rows.waiting[kind])
        values = [column for kind in added for column in _columns(kind, rows.waiting[kind])]
        _about_to_commit()
        written = await connection.fetchval(sql.write_sql(added), *_head_values(run, before), *values)
        is_written = written is not None
        counts.single += is_written and not looks_up
    else:
        is_written = await _in_transaction(connection, run, before, rows)
    if is_written:
        reached("txn.after_commit")
    return is_written


async def _in_transaction(connection: Connection, run: CachedRun, before: RunHead, rows: BatchRows) -> bool:
    async with connection.transaction():
        if await connection.fetchval(sql.SET_HEAD, *_head_values(run, before)) is None:
            return False
        await _write_rows(connection, rows)
        _about_to_commit()
    return True


def _about_to_commit() -> None:
    """Reach the failpoints on both sides of sending the statement that follows, which commits. The driver sends a
    statement in the step of the event loop that begins the call, if the server has prepared the statement before.
    """
    reached("txn.before_commit")
    asyncio.get_running_loop().call_soon(reached, SENT)


async def _write_exactly(connection: Connection, batch: Batch) -> CachedRun | None:
    """Lock and read the head of the run, and apply what is not applied yet. Return the run after the batch."""
    run_id = batch.run_id
    async with connection.transaction():
        reached("txn.begun")
        if _takes_over(batch.changes):
            await connection.execute(sql.LOCK_ORIGINALS)
        created = next((one for one in batch.changes[:1] if isinstance(one, RunCreated)), None)
        number = None
        if created is not None and batch.first_seq == 1 and batch.epoch == 0:
            number = await _add_run(connection, run_id, rules.new_head(created))
        found = None
        if number is None:
            found = await read_head(connection, run_id, lock=True, settings=created is not None)
        skipped = rules.count_applied(batch, None if found is None else found[1])
        changes = batch.changes[skipped:]
        if not changes:
            return None
        if found is None:
            assert number is not None
            assert created is not None
            run = CachedRun(rules.new_head(created), NO_USAGE, PrefetchedTasks(run_id, number, number << 32))
        else:
            run = CachedRun(found[1], found[2], PrefetchedTasks(run_id, found[0]))
            await run.tasks.prefetch(connection, changes)
        before = run.head
        rows = _apply(run, run_id, batch.first_seq + skipped, changes, await _read_originals(connection, changes))
        if await connection.fetchval(sql.SET_HEAD, *_head_values(run, before)) is None:
            raise AssertionError(f"the locked head of run {run_id!r} changed")
        for claim in changes:
            if isinstance(claim, RunClaimed):
                await connection.execute(sql.SET_LEASE, run.number, _lease(claim))
        await _write_rows(connection, rows)
        _about_to_commit()
    reached("txn.after_commit")
    return run


def _lease(claim: RunClaimed) -> float:
    """Return the length of the lease in seconds. Both times come from the owner's clock, so its error cancels out."""
    return claim.lease_expires_at - datetime.fromisoformat(claim.at).timestamp()


async def _add_run(connection: Connection, run_id: str, head: RunHead) -> int | None:
    """Add the row of a new run. Return the run's number, or None if there is such a run."""
    pieces = cut_settings(head.settings)
    checksum, kept = content_checksum(run_id, head.settings), "" if pieces else head.settings
    await _write_blobs(connection, {key: (size, piece) for key, size, piece in pieces})
    values = run_id, head.name, kept, checksum, head.created_at
    number: int | None = await connection.fetchval(sql.ADD_RUN, *values)
    if number is not None and pieces:
        await connection.execute(sql.ADD_PIECES, number, [key for key, _, _ in pieces])
    return number


def _apply(run: CachedRun, run_id: str, first_seq: int, changes: Sequence[Change], originals: Originals) -> BatchRows:
    """Apply the changes to the run. Return the rows. Raises Conflict."""
    head, last_seq = run.head, first_seq + len(changes) - 1
    if not OF_TASKS.issuperset(map(type, changes)):
        for seq, change in enumerate(changes, first_seq):
            head = rules.advance_head(head, change, seq, run_id)
    rows = BatchRows(run_id)
    run.tasks.begin_batch(changes)
    applier = ChangeApplier(run_id, run.tasks, rows, originals)
    applier.apply(first_seq, changes)
    run.head, run.usage = replace(head, last_seq=last_seq), run.usage + applier.usage
    run.tasks.mark_written(run.head, last_seq)
    return rows


def _head_values(run: CachedRun, before: RunHead) -> tuple[Any, ...]:
    columns = run_columns(run.number, run.tasks.run_id, run.head, run.usage)
    return (
        *columns,
        run.head.epoch,
        run.number,
        before.epoch,
        before.last_seq,
        before.owner and before.owner.owner_id,
    )


def _only_adds(rows: BatchRows) -> bool:
    return not rows.blobs_by_key and not rows.to_renew() and not rows.waiting[kinds.DISCARD_RESULTS]


async def _write_rows(connection: Connection, rows: BatchRows) -> None:
    await _write_blobs(connection, rows.blobs_by_key)
    to_renew = rows.to_renew()
    for kind in kinds.IN_ORDER:
        if kind in to_renew:
            rows.renew(kind, map(tuple, await connection.fetch(sql.FIND[kind], to_renew[kind])))
        if kind in _HAND_OVER:
            for row in _columns(kind, rows.waiting[kind])[0]:
                await connection.execute(_HAND_OVER[kind], row, row)
        if rows.waiting[kind]:
            await connection.execute(sql.rows_sql(kind), *_columns(kind, rows.waiting[kind]))


async def _write_blobs(connection: Connection, blobs: dict[bytes, tuple[int, str]]) -> None:
    if blobs:
        keys = sorted(blobs)
        sizes, texts = zip(*(blobs[key] for key in keys), strict=True)
        await connection.execute(sql.ADD_BLOBS, keys, list(sizes), list(map(escaped, texts)))


def _columns(kind: kinds.RowKind, values: list[Any]) -> list[list[Any]]:
    """Return the values of each column, with NULL in the place of substitutes."""
    names = kind.columns.split()
    if kind is kinds.ADD_SESSIONS:
        values = _last_of_each_session(values, len(names))
    columns = [values[position :: len(names)] for position in range(len(names))]
    for name, substitute in sql.SUBSTITUTED.get(kind, {}).items():
        position = names.index(name)
        columns[position] = [None if value == substitute else value for value in columns[position]]
    for position in sql.text_columns(kind):
        columns[position] = [escaped(value) if isinstance(value, str) else value for value in columns[position]]
    return columns


def _last_of_each_session(values: list[Any], width: int) -> list[Any]:
    """Return one row for each session: ON CONFLICT DO UPDATE must not meet a row twice. The first opening stays."""
    rows: dict[tuple[Any, ...], list[Any]] = {}
    for start in range(0, len(values), width):
        row = values[start : start + width]
        first = rows.setdefault(tuple(row[:3]), row)
        first[3], first[5] = row[3], row[5]
    return [value for row in rows.values() for value in row]


async def send_note(connection: Connection, run_id: str, note: Note) -> None:
    """Add the note to the run's inbox, and notify the owner. Raises Conflict, or an error of asyncpg."""
    async with connection.transaction():
        reached("txn.begun")
        if await connection.fetchval(sql.LOCK_RUN, run_id) is None:
            raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")
        number = await connection.fetchval(sql.NEXT_NOTE, run_id)
        row = run_id, number, note.kind, note.at, note.task_id
        await connection.execute(sql.ADD_NOTE, *row, note.body, message_checksum(row, note.body))
        # Here only: a NOTIFY takes a lock of the whole cluster at the commit, and would slow down every batch.
        await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, payload(run_id))
        _about_to_commit()
    reached("txn.after_commit")
