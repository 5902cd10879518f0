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
refused change is lost. Either way the executor is ahead of what is stored. So nothing that was not told yet begins:
the writer forgets the starts behind the refusal, with all that follows from them, and calls `on_refused`, so that the
executor starts nothing more. The run then goes on from what is stored, as after a crash (`Diverged`).
If a change is lost, the end of the run is not stored either: the run stays resumable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Protocol

import anyio
import anyio.lowlevel

from plait import events
from plait.clock_and_ids import Clock, iso
from plait.errors import Conflict, Fenced, Gap, StoreBusy, StoreError, StoreNotOpen, StoreRefused
from plait.events import Event, RunClaimed
from plait.failpoints import reached
from plait.persistence.store_protocol import Store, server_of
from plait.persistence.store_records import Batch
from plait.program_log import logger
from plait.runner.asyncio_cancellation import outlasting_cancellation
from plait.runner.domain.run_result import Degradation
from plait.runner.engine.event_feed import Feed
from plait.statuses import TaskStatus

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


@dataclass(frozen=True, slots=True)
class WritePosition:
    """The place of a run's next change."""

    epoch: int = 0
    """The number of stored RunClaimed changes."""
    next_seq: int = 1
    """The sequence number of the next change."""
    owner_id: str | None = None
    """As in Batch."""


class _Unit:
    """An event to be stored and published."""

    __slots__ = ("event", "is_told", "replaces")

    def __init__(self, event: Event | None, *, again: bool = False) -> None:
        self.event = event
        """None once the event is forgotten: it is neither stored nor published."""
        self.is_told = again
        """Whether the event is published."""
        self.replaces = again
        """Whether the event stands in the place of a refused one, or was stored before."""


def _stored(units: Iterable[_Unit]) -> tuple[Event, ...]:
    """Return the events of the units that have a number in the store."""
    return tuple(unit.event for unit in units if unit.event is not None and unit.event.stored)


@dataclass(frozen=True, slots=True)
class _Group:
    """Submissions that are written together."""

    units: list[_Unit]
    commit: Commit
    """The commit returned for each of the submissions."""

    @property
    def ending(self) -> bool:
        """True if the group leaves the run without an owner. It is then written at once, as no later write follows."""
        return bool(self.units) and isinstance(self.units[-1].event, events.RunEnded | events.RunReleased)


class Checkpointer:
    """Writes one run's changes. With `strict`, a store failure ends the run with StoreError.

    The writer calls `on_fatal` when the store forces the run to stop: another owner has taken the run over, the
    store refuses the first write of the run or is not open, or a write fails with `strict`.
    """

    def __init__(self, store: Store, run_id: str, feed: Feed, clock: Clock, strict: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._feed = feed
        self._clock = clock
        self._strict = strict
        self._log = logger(run=run_id)
        self._position = WritePosition()
        self._unstored: deque[_Unit] = deque()
        """Events not known to be stored, oldest first. Their first change has the number `next_seq`."""
        self._groups: deque[_Group] = deque()
        """Groups waiting for the store, oldest first. Only the last group takes further submissions."""
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
        """See EventSink."""
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
        """See EventSink."""
        group = self._group_with([_Unit(event) for event in new_events])
        self.run_ended = self.run_ended or group.ending
        return group.commit

    def _group_with(self, units: list[_Unit]) -> _Group:
        if self._has_diverged:
            self._forget_unbegun(units)
        if not self._groups:
            if self.away:
                return self._keep_in_memory(units)
            self._groups.append(_Group([], Commit()))
            self._wake.set()
        group = self._groups[-1]
        group.units.extend(units)
        return group

    def _keep_in_memory(self, units: list[_Unit]) -> _Group:
        """Keep the changes in memory while the store is away, and set the commit at once, even during a retry. Only the
        group that ends the run waits for the store.
        """
        group = _Group(units, Commit())
        if group.ending:
            self._groups.append(group)
            self._wake.set()
        else:
            self._unstored += group.units
            self._publish(group)
        return group

    async def write_until_closed(self) -> None:
        """Write the submissions until `close`. On return all changes are stored, or the loss is recorded in `degraded`.

        Shielded from cancellation.
        """
        with anyio.CancelScope(shield=True):
            while True:
                with outlasting_cancellation():
                    await self._wait_for_work()
                await self._write_group()
                if self._closing and not self._groups:
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
    def goes_on(self) -> bool:
        """True if the run has to go on from what is stored: attempts failed in the store alone, and no change is
        lost.
        """
        return self._has_diverged and self.loss is None and self.fatal is None and not self._unstored

    @property
    def away(self) -> bool:
        """True while the store fails."""
        return bool(self.degraded) and self.degraded[-1].until is None

    async def _wait_for_work(self) -> None:
        """Wait for something to do: submissions, the close, or the time to try a failing store again."""
        if self._groups or self._closing:
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
        group = self._groups.popleft() if self._groups else _Group([], Commit())
        self._unstored += group.units
        ending = group.ending
        is_time = ending or not self.away or self._clock.monotonic() >= self._retry_at
        if self._unstored and self.fatal is None and is_time:
            await self._write_unstored()
        if ending:
            await self._retry_at_end()
        self._publish(group)
        while self.away and self._groups and not self._groups[0].ending:
            waiting = self._groups.popleft()
            self._unstored += waiting.units
            self._publish(waiting)

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
                self._log.warning("waiting_for_store", seconds=patience, unstored=self._count_unstored())
                self._feed.publish(events.StoreAwaited(iso(self._clock.wall()), self._count_unstored(), patience))
            with outlasting_cancellation(), anyio.CancelScope() as self._pause:
                await self._clock.sleep(delay)
            await self._write_unstored()

    def _patience(self) -> float | None:
        """Return the longest wait of the end for the store, in seconds; None for the short waits of LAST_TRIES_S."""
        if isinstance(self._error, StoreBusy):
            return BUSY_PATIENCE_S
        if isinstance(self._error, Gap | StoreRefused):  # nothing to come closes the gap; a refusal does not pass
            return None
        return SERVER_PATIENCE_S if self._kept is not None and self._waits else None

    def _publish(self, group: _Group) -> None:
        """Publish the events and set the commit of the group. After a fatal error no events are published."""
        if self.fatal is None:
            for unit in group.units:
                if unit.event is not None:
                    self._feed.publish(unit.event)
                unit.is_told = True
            reached("events.published")
        group.commit.set()

    async def _write_unstored(self) -> None:
        limit: int = BATCH_LIMIT
        count = 0
        while self._unstored:
            head = self._next_batch(limit)
            self._withhold_end(head[-1])
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

    def _settle_refusal(self, head: Sequence[_Unit], error: Conflict) -> None:
        """Let the attempt whose end is refused fail in its place, or record the loss of `head`. Forget what follows."""
        refused = head[0]
        if isinstance(refused.event, _ENDS_OF_ATTEMPTS) and not refused.replaces:
            self._fail_in_place(refused, refused.event, error)
        else:
            for _ in head:
                self._unstored.popleft()
            changes = _stored(head)
            starts = (unit.event for unit in head if isinstance(unit.event, events.TaskStarted) and not unit.replaces)
            self._unbegun |= {start.task_id for start in starts}
            self._record_loss(error, len(changes))
            if all(change.informs for change in changes):
                return
        self._has_diverged = True
        self._forget_unbegun([*self._unstored, *(unit for group in self._groups for unit in group.units)])
        self.on_refused()

    def _fail_in_place(self, unit: _Unit, ended: _ENDS_OF_ATTEMPTS, error: Conflict) -> None:
        # The words of the store may quote the very value that it refuses.
        reason = str(error)[:_LONGEST_REASON].encode("ascii", "backslashreplace").decode()
        skips = self.status_of_failure(ended.task_id) is TaskStatus.SKIPPED
        failed = (events.TaskSkipped if skips else events.TaskFailed)(
            ended.at,
            ended.task_id,
            ended.attempt,
            NOT_STORED,
            f"the store refused the end of the attempt: {reason}",
            ended.duration_s or 0.0,
            ended.usage,
        )
        self._log.error("result_not_stored", task=ended.task_id, attempt=ended.attempt, error=reason)
        self._settled.add(ended.task_id)
        unit.event, unit.replaces = failed, True
        if unit.is_told:  # during an outage
            self._feed.publish(failed)

    def _forget_unbegun(self, units: Sequence[_Unit]) -> None:
        """Forget the starts among `units` that nobody was told of, and what follows from them or from a refused change:
        no backend was called, and the policy is asked again.
        """
        is_cancelled = any(isinstance(unit.event, events.RunCancelled) for unit in units)
        ended: set[str] = set()
        for unit in units:
            if unit.is_told or unit.replaces:
                continue
            match unit.event:
                case events.TaskStarted(task_id=task_id) if not isinstance(unit.event, events.TaskAdopted):
                    self._unbegun.add(task_id)
                    unit.event = None
                case events.TasksAdded(added_by=added_by) if added_by not in ended:
                    unit.event = None
                case events.PolicyDecided():
                    unit.event = None
                case events.TaskCancelled(task_id=task_id):
                    if not is_cancelled or task_id in self._settled:
                        unit.event = None
                case events.TaskEvent(task_id=task_id) if task_id in self._settled or task_id in self._unbegun:
                    unit.event = None
                case events.TaskCompleted(task_id=task_id):
                    ended.add(task_id)
                case _:
                    pass

    def _withhold_end(self, unit: _Unit) -> None:
        """Do not store the end of a run of which a change is lost, or which goes on from what is stored."""
        if not isinstance(unit.event, events.RunEnded) or isinstance(unit.event, events.RunCancelled):
            return
        if not (self.loss or self._has_diverged):
            return
        if self.loss is None:
            unit.event = None  # the run keeps its owner: no other process takes it over in between
            return
        unit.event = events.RunInterrupted(unit.event.at, unit.event.run_id, self.loss)

    async def _close_gap(self, gap: Gap, kept: KeptEvents) -> StoreError | None:
        """Put the changes that the store has lost before the unstored changes. Return None, or the error if the store
        cannot be read, or has lost more than is kept.
        """
        try:
            record = await self._store.get_run(self._run_id)
        except StoreError as error:
            return error
        next_seq = 1 if record is None else record.last_seq + 1
        again = kept.take_from(next_seq)
        if again is None:
            return Gap(
                f"the store is behind: it has the changes of run {self._run_id} up to {next_seq - 1} only, and this "
                "process no longer keeps all later ones; they are lost unless the server is put back in its place",
                next_seq,
            )
        self.on_gap()
        self._note_outage(gap)
        self._log.warning("changes_written_again", next_seq=next_seq, changes=len(again))
        self._unstored.extendleft(_Unit(event, again=True) for event in reversed(again))
        claims = [type(event) for event in again].count(RunClaimed)
        owner_id = None if claims else self._position.owner_id
        self._position = WritePosition(self._position.epoch - claims, next_seq, owner_id)
        return None

    def _next_batch(self, limit: int) -> list[_Unit]:
        """Return the first `limit` unstored events, and the following events that belong to the last of the first: the
        end of a start that was submitted together with it, as of an answer of an earlier run, and what came of an end.
        """
        head = list(islice(self._unstored, limit))
        following, last = 0, head[-1].event
        begun = last.task_id if isinstance(last, events.TaskStarted) else None
        for number, unit in enumerate(islice(self._unstored, limit, None), 1):
            ends = number == 1 and isinstance(unit.event, events.TaskCompleted) and unit.event.task_id == begun
            if ends or isinstance(unit.event, events.TasksAdded | events.PolicyDecided):
                following = number
            elif not isinstance(unit.event, events.TaskCancelled):  # cancellations precede the decision of the policy
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
        for _ in range(count):
            self._unstored.popleft()

    def _record_loss(self, error: Conflict, count: int) -> None:
        self.loss = f"the store refused a change of the run for good, so its end is not stored: {error}"
        at, place = iso(self._clock.wall()), len(self.degraded) - self.away  # an open outage stays last
        before = self.degraded[place - 1] if place else None
        if before is not None and before.lost and before.error == str(error):  # likely a consequence of the last loss
            self.degraded[place - 1] = replace(before, until=at, lost=before.lost + count)
            return
        self.degraded.insert(place, Degradation(at, at, str(error), lost=count))
        self._log.error("change_not_stored", error=str(error))

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
        self._log.warning("store_degraded", error=str(error), unstored=self._count_unstored())
        self._feed.publish(events.StoreDegraded(at, str(error)))

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
        self._log.warning("store_recovered", changes=count)
        self._feed.publish(events.StoreRecovered(at, count))


@dataclass(frozen=True, slots=True)
class _KeptBatch:
    at: float
    """The time of the clock at which the batch was stored."""
    events: tuple[Event, ...]
    size: int


class KeptEvents:
    """The last events that the store has acknowledged, without a gap: whole batches, of KEPT_S seconds and up to
    KEPT_BYTES.
    """

    def __init__(self) -> None:
        self._batches: deque[_KeptBatch] = deque()
        self._size = 0
        self._next_seq = 1

    def add(self, first_seq: int, new: tuple[Event, ...], now: float) -> None:
        """Keep the events, the first of which has the number `first_seq`, and drop what is too old or too much."""
        if first_seq != self._next_seq:
            self._batches.clear()
            self._size = 0
        batch = _KeptBatch(now, new, sum(map(_size_of, new)))
        self._batches.append(batch)
        self._size += batch.size
        self._next_seq = first_seq + len(new)
        while self._batches and (self._size > KEPT_BYTES or self._batches[0].at < now - KEPT_S):
            self._size -= self._batches.popleft().size

    def take_from(self, seq: int) -> tuple[Event, ...] | None:
        """Return the kept events from number `seq` on, and drop all kept events; None if some are not kept."""
        kept = tuple(chain.from_iterable(batch.events for batch in self._batches))
        count = self._next_seq - seq
        if not 0 < count <= len(kept):
            return None
        self._batches.clear()
        self._size, self._next_seq = 0, seq
        return kept[len(kept) - count :]


_FIXED = 200
"""Bytes of a change without its texts, about."""


def _size_of(change: object) -> int:
    size = _FIXED
    for name in getattr(change, "__dataclass_fields__", ()):
        one: object = getattr(change, name)
        if type(one) is str:
            size += len(one)
        elif type(one) is tuple:
            size += sum(map(_size_of_item, one))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return size


def _size_of_item(one: object) -> int:
    return len(one) if isinstance(one, str) else _size_of(one)


class EventSink(Protocol):
    """A receiver of the events of an execution."""

    @property
    def away(self) -> bool:
        """True while events are not stored because the store fails."""
        ...

    on_refused: Callable[[], None]
    """Called when the store has refused a change for good, so that the execution is ahead of what is stored."""

    def submit(self, new_events: Sequence[Event]) -> Commit:
        """Submit `new_events` for storage in one transaction and for publication afterwards. Never waits.

        Returns a commit that is set once all events are durable, or the store is known to be away.
        """
        ...


class UnstoredSink:
    """The sink of a run without a store."""

    away = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.on_refused: Callable[[], None] = lambda: None

    def submit(self, new_events: Sequence[Event]) -> Commit:
        """Publish `new_events` at once. Return a commit that is set already."""
        for event in new_events:
            self._feed.publish(event)
        return COMMITTED
