"""`Checkpointer`: the only writer to the store.

All waiting submissions go into one transaction (group commit): while the store writes one batch, the next one gathers.
`submit` is a plain function and never waits, so no cancellation can interrupt a submission halfway; only the wait for
the returned `Commit` can be cancelled. The writer task runs in a shielded scope, outside every scope that the writer
serves, and after `close` still writes the remaining changes. The writer does the same if every task of the event loop
is cancelled, because the release of an interrupted run has to be stored.

When the store fails, the unstored changes stay in memory, in order. Commits are then set without waiting for the store,
and the writer retries with growing delays. Batches carry sequence numbers, so a repeated write is harmless: after an
exception the result of a write is unknown, not failed.

A store on a server (`ServerStore`) may come back without its last changes: a standby is promoted before it has received
them. It then answers with Gap, and the writer writes again what it has kept (`KeptEvents`). If too little is kept, the
gap counts as an outage: changes stay in memory, and what is still missing at the end is reported as lost.

A store may refuse a change for good (Conflict): a value is too large, a constraint of the database's owner fails. The
writer then writes event by event. An attempt whose end is refused fails in its place, with the reason; any other
refused change is lost. Either way the executor is ahead of what is stored. So nothing begins that is not published yet:
the writer forgets the starts behind the refusal, with all that follows from them, and calls `on_refused`, so that the
executor starts nothing more. The run then restarts from what is stored, as after a crash (`LiveRun.restarts`).
If a change is lost, the end of the run is not stored either: the run stays resumable.

Each call of a run's store, reads included, has a time limit, and every failure of a call is a StoreError (`bounded` in
`run_options`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import TypeAlias

import anyio
import anyio.lowlevel

from plait import events
from plait.clock_and_ids import Clock, iso
from plait.errors import Conflict, Fenced, Gap, StoreBusy, StoreError, StoreNotOpen, StoreRefused
from plait.events import Event, RunClaimed
from plait.failpoints import reached
from plait.json_form import value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch
from plait.program_log import logger
from plait.runner.domain.run_result import Degradation
from plait.runner.engine.run_options import Cancels, server_of
from plait.statuses import TaskStatus

Publish: TypeAlias = Callable[[Event], None]
"""Shows an event, which is stored, to whoever follows the run."""

FIRST_RETRY_S = 0.1
"""Seconds before the first retry of a failed write. Each further failure doubles the delay."""
LAST_RETRY_S = 5.0
"""Longest delay before a retry, in seconds."""
LAST_TRIES_S = (0.1, 0.2)
"""Seconds before each of the last writes, when the run has ended."""
BUSY_PATIENCE_S = 60.0
"""Seconds that the end of a run waits while another process writes to the store, such as `plait gc`."""
SERVER_PATIENCE_S = 300.0
"""Seconds that the end of a run waits for a store on a server, as during a failover. A stop ends the wait."""
BATCH_LIMIT = 20_000
"""Most events in one transaction, so that the writer catches up in steps after a long outage."""
NOT_STORED = "not_stored"
"""The kind of error of a task whose end the store refused."""

KEPT_S = 600.0
"""Seconds for which a stored event is kept for a server that loses it."""
KEPT_BYTES = 64 << 20
"""Most bytes of kept events, about."""

_LONGEST_REASON = 1000
_ENDS_OF_RUNS = events.RunEnded, events.RunReleased
_ENDS_OF_ATTEMPTS = events.TaskCompleted | events.TaskFailed | events.TaskRetried | events.TaskWaiting


class Commit:
    """A submission to the store, set once the submission is stored or the store is known to be away."""

    __slots__ = ("_calls", "_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._calls: list[Callable[[], None]] = []
        self._waiting: list[asyncio.Future[None]] = []

    def wait(self) -> Awaitable[None]:
        """Wait until `set` is called. Cancellable.

        If already set, still yield to the event loop once, so that a caller in a loop does not starve other tasks.
        """
        if self._is_set:
            return anyio.lowlevel.checkpoint()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` during `set`, or at once if already set. `call` must not raise."""
        if self._is_set:
            call()
        else:
            self._calls.append(call)

    def set(self) -> None:
        """Make all calls registered with `then`, then wake the waiting tasks."""
        self._is_set = True
        for call in self._calls:
            call()
        self._calls.clear()
        for future in self._waiting:
            if not future.done():  # a cancelled future is done
                future.set_result(None)
        self._waiting.clear()


COMMITTED = Commit()
"""A commit that is set from the start."""
COMMITTED.set()


@value
class WritePosition:
    """The place of a run's next change."""

    epoch: int = 0
    """The number of stored RunClaimed changes."""
    next_seq: int = 1
    """The sequence number of the next change."""
    owner_id: str | None = None
    """As in Batch."""


def _stored(unstored: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events that have a number in the store."""
    return tuple(event for event in unstored if event.stored)


class Checkpointer:
    """Writes one run's changes. With `strict`, a store failure ends the run with StoreError.

    The writer calls `on_fatal` when the store forces the run to stop: another owner has taken the run over, the
    store refuses the first write of the run or is not open, or a write fails with `strict`.
    """

    def __init__(self, store: Store, run_id: str, publish: Publish, clock: Clock, strict: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._publish_event = publish
        self._clock = clock
        self._strict = strict
        self._position = WritePosition()
        self._gathered: list[Event] = []
        """The submissions that are written together, once the writer is free."""
        self._commit: Commit | None = None
        """The commit returned for each of these submissions; None without any."""
        self._unstored: deque[Event] = deque()
        """Events with the writer that are not known to be stored, oldest first. The first has the number `next_seq`."""
        self._published = 0
        """How many of the unstored events, the oldest, are published already: they are kept during an outage."""
        self._replayed = 0
        """How many of the unstored events, the oldest, replace a refused end, or were stored and then lost by the
        server.
        """
        self._unpublished: list[Event] = []
        """Events that the writer has written, to be published with their commit."""
        self._wake = anyio.Event()
        self._closing = False
        self.run_ended = False
        """True once the end or the release of the run is submitted: no lease renewal may follow."""
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._error: StoreError | None = None
        self._kept = None if server_of(store) is None else KeptEvents()
        self._pause = anyio.CancelScope()
        """The wait before a last write."""
        self._waits = True
        """False once `end_wait` was called."""
        self.degraded: list[Degradation] = []
        """The outages of the store and the losses of changes. An open outage is last."""
        self.fatal: StoreError | None = None
        """The error that forces the run to stop."""
        self.on_fatal: Callable[[], None] = lambda: None
        self.on_gap: Callable[[], None] = lambda: None
        """Called when changes that the store has lost are about to be written again."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when the store has refused a change for good, so that the execution is ahead of what is stored."""
        self.status_of_failure: Callable[[str], TaskStatus] = lambda _task_id: TaskStatus.FAILED
        """Returns the status of the task after a failure, see `failed_status`."""
        self.requires_start = False
        """Whether a run whose creation is not stored must not begin, as with `strict`."""
        self._settled: set[str] = set()
        """The tasks that failed in the store because the end of an attempt was refused."""
        self._unbegun: set[str] = set()
        """The tasks whose start was forgotten after a refusal."""
        self._has_diverged = False
        """Whether the executor is ahead of what is stored, since a change was refused."""
        self.loss: str | None = None
        """Why the end of the run is not stored: a change was refused and is lost."""

    def begin_at(self, position: WritePosition) -> None:
        """Continue a stored run at `position`. To be called before the first submission."""
        self._position = position

    def submit(self, new_events: Sequence[Event]) -> Commit:
        """Submit `new_events` for storage in one transaction and for publication afterwards. Never waits.

        Returns a commit that is set once all events are durable, or the store is known to be away.
        """
        self.run_ended = self.run_ended or (bool(new_events) and isinstance(new_events[-1], _ENDS_OF_RUNS))
        if self._has_diverged:
            new_events = [*filter(self._follows_nothing_forgotten(new_events), new_events)]
        if self._commit is None:
            # While the store is away only the end of the run waits for it.
            if self.away and self._published == len(self._unstored) and not self.run_ended:
                self._unstored += new_events
                self._publish()
                return COMMITTED
            self._commit = Commit()
            self._wake.set()
        self._gathered += new_events
        return self._commit

    async def write_until_closed(self) -> None:
        """Write the submissions until `close`. On return all changes are stored, or the loss is recorded in `degraded`.

        Shielded from cancellation.
        """
        with anyio.CancelScope(shield=True):
            while True:
                with outlasting_cancellation():
                    await self._wait_for_work()
                await self._write_group()
                if self._closing and self._commit is None:
                    break
            if self._unstored and self.away:
                self.degraded[-1] = replace(self.degraded[-1], lost=self._count_unstored())

    def close(self) -> None:
        """Let the writer return once the remaining changes are written."""
        self._closing = True
        self._wake.set()

    def end_wait(self) -> None:
        """Stop waiting for a failing store at the end of the run. Called before the end, this limits that wait to
        LAST_TRIES_S, or to BUSY_PATIENCE_S for a busy store.
        """
        self._waits = False
        self._pause.cancel()

    @property
    def restarts(self) -> bool:
        """True if the run has to restart from what is stored: attempts failed in the store alone, and no change is
        lost.
        """
        return self._has_diverged and self.loss is None and self.fatal is None and not self._unstored

    @property
    def away(self) -> bool:
        """True while the store fails."""
        return bool(self.degraded) and self.degraded[-1].until is None

    async def _wait_for_work(self) -> None:
        """Wait for something to do: submissions, the close, or the time to try a failing store again."""
        if self._commit is not None or self._closing:
            return
        self._wake = anyio.Event()
        if not self.away or self.fatal:
            await self._wake.wait()
            # One more cycle of the event loop, so that submissions of the same cycle join the transaction.
            await anyio.lowlevel.cancel_shielded_checkpoint()
            return
        with anyio.move_on_after(max(0.0, self._retry_at - self._clock.monotonic())):
            await self._wake.wait()

    async def _write_group(self) -> None:
        commit = self._take_gathered()
        is_end = commit is not None and self.run_ended
        is_time = is_end or not self.away or self._clock.monotonic() >= self._retry_at
        if self._unstored and self.fatal is None and is_time:
            await self._write_unstored()
        if is_end:  # no later write follows
            await self._retry_at_end()
        self._publish()
        if commit is not None:
            commit.set()
        if self.away and not self.run_ended and (commit := self._take_gathered()) is not None:
            self._publish()
            commit.set()

    def _take_gathered(self) -> Commit | None:
        commit, self._commit = self._commit, None
        self._unstored += self._gathered
        self._gathered = []
        return commit

    async def _retry_at_end(self) -> None:
        """Retry at the end of the run, because no later write follows: up to BUSY_PATIENCE_S seconds if the store is
        busy, up to SERVER_PATIENCE_S seconds if the store is a server that does not refuse; otherwise for the waits of
        LAST_TRIES_S, but for at most about a second.
        """
        began = self._clock.monotonic()
        for tries, delay in enumerate(chain(LAST_TRIES_S, repeat(1.0))):
            took, patience = self._clock.monotonic() - began, self._patience()
            is_enough = took >= 1.0 or tries >= len(LAST_TRIES_S) if patience is None else took >= patience
            if not self.away or self.fatal or is_enough:
                return
            if patience is not None and tries == len(LAST_TRIES_S):
                logger(run=self._run_id).warning("waiting_for_store", seconds=patience, unstored=self._count_unstored())
                self._publish_event(events.StoreAwaited(iso(self._clock.wall()), self._count_unstored(), patience))
            with outlasting_cancellation(), anyio.CancelScope() as self._pause:
                await self._clock.sleep(delay)
            await self._write_unstored()

    def _patience(self) -> float | None:
        """Return the longest wait of the end for the store, in seconds; None for the short waits of LAST_TRIES_S."""
        if isinstance(self._error, StoreBusy):
            return BUSY_PATIENCE_S
        # Nothing to come closes a gap, and a refusal does not pass.
        may_pass = self._kept is not None and self._waits and not isinstance(self._error, Gap | StoreRefused)
        return SERVER_PATIENCE_S if may_pass else None

    def _publish(self) -> None:
        """Publish all events that the writer has taken. After a fatal error no events are published."""
        if self.fatal is not None:
            return
        for event in chain(self._unpublished, islice(self._unstored, self._published, None)):
            self._publish_event(event)
        self._unpublished, self._published = [], len(self._unstored)
        reached("events.published")

    async def _write_unstored(self) -> None:
        limit: int = BATCH_LIMIT
        count = 0
        while self._unstored:
            self._withhold_end()
            head = self._next_batch(limit)
            changes = _stored(head)
            error = await self._try_write(changes) if changes else None
            if isinstance(error, Gap) and self._kept is not None and self.began and not self._strict:
                error = await self._close_gap(error, self._kept)
                if error is None:
                    continue
                self._record_failure(error)
                return
            if isinstance(error, Conflict) and not isinstance(error, Gap) and self.began and not self._strict:
                # A retry cannot help. Written singly, all events except the refused event are stored.
                if limit == 1:
                    self._settle_refusal(head, error)
                limit = BATCH_LIMIT if limit == 1 else 1
                continue
            if error is not None:
                self._record_failure(error)
                return
            self._record_stored(len(head), changes)
            count += len(changes)
        self._record_recovery(count)

    def _settle_refusal(self, head: Sequence[Event], error: Conflict) -> None:
        """Let the attempt whose end is refused fail in its place, or record the loss of `head`. Forget what follows."""
        if isinstance(head[0], _ENDS_OF_ATTEMPTS) and not self._replayed:
            self._fail_in_place(head[0], error)
        else:
            self._unbegun |= {one.task_id for one in head[self._replayed :] if isinstance(one, events.TaskStarted)}
            self._take_off(len(head))
            changes = _stored(head)
            self._record_loss(error, len(changes))
            if all(change.informs for change in changes):
                return
        self._has_diverged = True
        old = max(self._published, self._replayed)
        new = [*islice(self._unstored, old, None)]
        follows_nothing_forgotten = self._follows_nothing_forgotten([*new, *self._gathered])
        self._unstored = deque([*islice(self._unstored, old), *filter(follows_nothing_forgotten, new)])
        self._gathered = [*filter(follows_nothing_forgotten, self._gathered)]
        self.on_refused()

    def _fail_in_place(self, ended: _ENDS_OF_ATTEMPTS, error: Conflict) -> None:
        # The words of the store may quote the very value that it refuses.
        reason = str(error)[:_LONGEST_REASON].encode("ascii", "backslashreplace").decode()
        skips = self.status_of_failure(ended.task_id) is TaskStatus.SKIPPED
        failed = (events.TaskSkipped if skips else events.TaskFailed)(
            ended.at,
            ended.task_id,
            ended.attempt,
            error_kind=NOT_STORED,
            error=f"the store refused the end of the attempt: {reason}",
            duration_s=ended.duration_s or 0.0,
            usage=ended.usage,
        )
        logger(run=self._run_id).error("result_not_stored", task=ended.task_id, attempt=ended.attempt, error=reason)
        self._settled.add(ended.task_id)
        self._unstored[0], self._replayed = failed, 1
        if self._published:  # during an outage
            self._publish_event(failed)

    def _follows_nothing_forgotten(self, unpublished: Sequence[Event]) -> Callable[[Event], bool]:
        """Return a filter of the events `unpublished`, in their order. It forgets their starts, and what follows from
        them or from a refused change: no backend was called, and the policy is asked again.
        """
        is_cancelled = any(isinstance(event, events.RunCancelled) for event in unpublished)
        completed: set[str] = set()

        def is_kept(event: Event) -> bool:
            match event:
                case events.TaskStarted(task_id=task_id) if not isinstance(event, events.TaskAdopted):
                    self._unbegun.add(task_id)
                    return False
                case events.TasksAdded(added_by=added_by):
                    return added_by in completed
                case events.PolicyDecided():
                    return False
                case events.TaskCancelled(task_id=task_id):
                    return is_cancelled and task_id not in self._settled
                case events.TaskEvent(task_id=task_id) if task_id in self._settled or task_id in self._unbegun:
                    return False
                case events.TaskCompleted(task_id=task_id):
                    completed.add(task_id)
                    return True
                case _:
                    return True

        return is_kept

    def _withhold_end(self) -> None:
        """Do not store the end of a run of which a change is lost, or which goes on from what is stored."""
        end = self._unstored[-1]
        if not isinstance(end, events.RunEnded) or isinstance(end, events.RunCancelled):
            return
        if self.loss is not None:
            self._unstored[-1] = events.RunInterrupted(end.at, end.run_id, self.loss)
        elif self._has_diverged:
            self._unstored.pop()  # the run keeps its owner: no other process takes it over in between
            self._published = min(self._published, len(self._unstored))

    async def _close_gap(self, gap: Gap, events: KeptEvents) -> StoreError | None:
        """Put the changes that the store has lost before the unstored changes. Return None, or the error if the store
        cannot be read, or has lost more than is kept.
        """
        try:
            record = await self._store.get_run(self._run_id)
        except StoreError as error:
            return error
        next_seq = 1 if record is None else record.last_seq + 1
        again = events.take_from(next_seq)
        if again is None:
            return Gap(
                f"the store is behind: it has the changes of run {self._run_id} up to {next_seq - 1} only, and this "
                "process no longer keeps all later ones; they are lost unless the server is put back in its place",
                next_seq,
            )
        self.on_gap()
        self._note_outage(gap)
        logger(run=self._run_id).warning("changes_written_again", next_seq=next_seq, changes=len(again))
        self._unstored.extendleft(reversed(again))
        self._published += len(again)
        self._replayed += len(again)
        claims = [type(event) for event in again].count(RunClaimed)
        owner_id = None if claims else self._position.owner_id
        self._position = WritePosition(self._position.epoch - claims, next_seq, owner_id)
        return None

    def _next_batch(self, limit: int) -> list[Event]:
        """Return the first `limit` unstored events, and the following events that belong to the last of the first: the
        end of a start that was submitted together with it, as of an answer of an earlier run, and what came of an end.
        """
        head = list(islice(self._unstored, limit))
        begun = head[-1].task_id if head and isinstance(head[-1], events.TaskStarted) else None
        following = 0
        for number, event in enumerate(islice(self._unstored, limit, None), 1):
            ends = number == 1 and isinstance(event, events.TaskCompleted) and event.task_id == begun
            if ends or isinstance(event, events.TasksAdded | events.PolicyDecided):
                following = number
            elif not isinstance(event, events.TaskCancelled):  # cancellations precede the decision of the policy
                break
        return [*head, *islice(self._unstored, limit, limit + following)]

    def _count_unstored(self) -> int:
        return len(_stored(self._unstored))

    def _record_stored(self, count: int, changes: tuple[Event, ...]) -> None:
        """Record that the first `count` unstored events, which have `changes`, are stored."""
        epoch, next_seq, owner_id = self._position.epoch, self._position.next_seq, self._position.owner_id
        if self._kept is not None:
            self._kept.add(next_seq, changes, self._clock.monotonic())
        for change in changes:
            if type(change) is RunClaimed:
                epoch, owner_id = epoch + 1, change.owner.owner_id
        self._position = WritePosition(epoch, next_seq + len(changes), owner_id)
        self._take_off(count)

    def _take_off(self, count: int) -> None:
        """Take the first `count` events, which are stored or lost, off the unstored ones."""
        taken, announced = [self._unstored.popleft() for _ in range(count)], min(self._published, count)
        self._unpublished += taken[announced:]
        self._published -= announced
        self._replayed = max(0, self._replayed - count)

    def _record_loss(self, error: Conflict, count: int) -> None:
        self.loss = f"the store refused a change of the run for good, so its end is not stored: {error}"
        at, place = iso(self._clock.wall()), len(self.degraded) - self.away  # an open outage stays last
        before = self.degraded[place - 1] if place else None
        if before is not None and before.lost and before.error == str(error):  # likely a consequence of the last loss
            self.degraded[place - 1] = replace(before, until=at, lost=before.lost + count)
            return
        self.degraded.insert(place, Degradation(at, at, str(error), lost=count))
        logger(run=self._run_id).error("change_not_stored", error=str(error))

    async def _try_write(self, changes: tuple[Event, ...]) -> StoreError | None:
        place = self._position
        batch = Batch(self._run_id, place.epoch, place.next_seq, changes, place.owner_id)
        while True:  # the result of a cancelled write is unknown, and the store is not away: write again
            reached("batch.before_write")
            with outlasting_cancellation():
                try:
                    await self._store.write(batch)
                except StoreError as error:
                    return error
                reached("batch.after_write")
                return None

    def _record_failure(self, error: StoreError) -> None:
        self._error = error
        refused = isinstance(error, Conflict) and not self.began
        never_opened = isinstance(error, StoreNotOpen) and not self.began and not self.degraded
        is_required = self.requires_start and not self.began
        if isinstance(error, Fenced) or self._strict or refused or never_opened or is_required:
            self.fatal = error
            self.on_fatal()
            return
        self._retry_at = self._clock.monotonic() + self._retry_s
        self._retry_s = min(LAST_RETRY_S, self._retry_s * 2)
        self._note_outage(error)

    def _note_outage(self, error: StoreError) -> None:
        """Record the beginning of an outage. A gap during an outage begins a second entry."""
        if self.away and (not isinstance(error, Gap) or self.degraded[-1].error == str(error)):
            return
        at = iso(self._clock.wall())
        if self.away:
            self.degraded[-1] = replace(self.degraded[-1], until=at)
        self.degraded.append(Degradation(at, None, str(error)))
        logger(run=self._run_id).warning("store_degraded", error=str(error), unstored=self._count_unstored())
        self._publish_event(events.StoreDegraded(at, str(error)))

    @property
    def began(self) -> bool:
        """True if any change of the run is stored."""
        return self._position.next_seq > 1

    def _record_recovery(self, count: int) -> None:
        if not self.away:
            return
        at = iso(self._clock.wall())
        self.degraded[-1] = replace(self.degraded[-1], until=at)
        self._retry_s = FIRST_RETRY_S
        logger(run=self._run_id).warning("store_recovered", changes=count)
        self._publish_event(events.StoreRecovered(at, count))


class KeptEvents:
    """The last events that the store has acknowledged, without a gap: whole batches, of KEPT_S seconds and up to
    KEPT_BYTES.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[float, tuple[Event, ...], int]] = deque()
        """The batches, each behind the time of the clock at which it was stored, and before its size."""
        self._size = 0
        self._next_seq = 1

    def add(self, first_seq: int, new: tuple[Event, ...], now: float) -> None:
        """Keep the events, the first of which has the number `first_seq`, and drop what is too old or too much."""
        if first_seq != self._next_seq:
            self._batches.clear()
            self._size = 0
        size = sum(map(_size_of, new))
        self._batches.append((now, new, size))
        self._size += size
        self._next_seq = first_seq + len(new)
        while self._batches and (self._size > KEPT_BYTES or self._batches[0][0] < now - KEPT_S):
            self._size -= self._batches.popleft()[2]

    def take_from(self, seq: int) -> tuple[Event, ...] | None:
        """Return the kept events from number `seq` on, and drop all kept events; None if some are not kept."""
        events = tuple(chain.from_iterable(batch for _, batch, _ in self._batches))
        count = self._next_seq - seq
        if not 0 < count <= len(events):
            return None
        self._batches.clear()
        self._size, self._next_seq = 0, seq
        return events[len(events) - count :]


_FIXED = 200
"""Bytes of a change without its texts, about."""


def _size_of(change: object) -> int:
    size = _FIXED
    for name in getattr(change, "__dataclass_fields__", ()):
        one: object = getattr(change, name)
        if type(one) is str:
            size += len(one)
        elif type(one) is tuple:
            size += sum(len(item) if isinstance(item, str) else _size_of(item) for item in one)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return size


class UnstoredSink:
    """Takes the events of a run without a store."""

    away = False

    def __init__(self, publish: Publish) -> None:
        self._publish_event = publish
        self.on_refused: Callable[[], None] = lambda: None

    def submit(self, new_events: Sequence[Event]) -> Commit:
        """Publish `new_events` at once. Return a commit that is set already."""
        for event in new_events:
            self._publish_event(event)
        return COMMITTED


EventSink: TypeAlias = Checkpointer | UnstoredSink
"""Takes the events of an execution."""


@contextmanager
def outlasting_cancellation() -> Generator[None]:
    """Absorb a native `Task.cancel()`, such as `asyncio.run` sends at shutdown.

    The await inside the block is interrupted and the task continues. Cancellation by a cancel scope is re-raised,
    because the scope would deliver the cancellation again.
    """
    cancels = Cancels()
    try:
        yield
    except asyncio.CancelledError:
        if not cancels.since or anyio.current_effective_deadline() == -math.inf:
            raise
        cancels.withdraw()
