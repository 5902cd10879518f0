"""`Checkpointer`: the only writer to the store.

Everything that waits goes into one transaction (group commit): while the store works on one batch, the next gathers.
A submission is plain and never waits, so no cancellation can tear it; only the waiting for it can be cancelled.
The writer task runs in a shielded scope, outside every scope that it serves, and ends after `close` with what is left;
so it does where every task of the loop is cancelled, for a run that is left so has to be written down as left.

When the store fails, what was not stored stays in memory, in order, nobody waits for the store any more, and the writer
tries again, slower and slower. Batches carry sequence numbers, so writing one again is harmless: a write that raised
is unknown, not failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Protocol

import anyio
import anyio.lowlevel

from plait.persistence import changes as stored
from plait.persistence.changes import Batch, Change, LeaseRenewed, RunClaimed, RunReleased
from plait.persistence.errors import Conflict, Fenced, StoreBusy, StoreError, StoreNotOpen
from plait.persistence.failpoints import reached
from plait.persistence.protocol import Store
from plait.persistence.rules import split_completion
from plait.runner.cancellation import outlasting_cancellation
from plait.runner.clock import Clock, iso
from plait.runner.domain import events
from plait.runner.domain.result import Degradation
from plait.runner.engine.commit import COMMITTED, Commit
from plait.runner.engine.feed import Feed
from plait.runner.log import logger
from plait.runner.state.codec import encode_event

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
LAST_TRIES_S = (0.1, 0.2)
"""The waits before the last attempts to write, when the run has ended."""
BUSY_PATIENCE_S = 60.0
"""For how long the end of a run waits for whoever else is writing to the store, such as `plait gc`."""
BATCH_LIMIT = 20_000
"""Changes in one transaction at most, so that catching up after a long outage goes in steps."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Submissions that are written together; `settled` serves all who wait for any of them."""

    changes: list[Change]
    events: list[events.Event]
    settled: Commit

    @property
    def ending(self) -> bool:
        """Whether the run ends with this: then the store is tried at once, for there is no later time."""
        return bool(self.changes) and type(self.changes[-1]) is RunReleased


class Checkpointer:
    """Writes one run's changes. `strict`: a store failure ends the run with StoreError.

    `on_fatal` is called once, by the writer, when the run has to stop because of the store: it was taken over by
    another owner, or `strict` was asked for.
    """

    def __init__(self, store: Store, run_id: str, feed: Feed, clock: Clock, strict: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._feed = feed
        self._clock = clock
        self._strict = strict
        self._log = logger(run=run_id)
        self._position = Position()
        self._unstored: deque[Change] = deque()
        """Handed to the store, or about to be, and not known to be there; the first has number `next_seq`."""
        self._groups: deque[_Group] = deque()
        """What waits for the store, oldest first; only the last one still takes submissions."""
        self._wake = anyio.Event()
        self._closing = False
        self._left = False
        """The owner's leaving is submitted: nothing may follow it."""
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._error: StoreError | None = None
        self.degraded: list[Degradation] = []
        self.fatal: StoreError | None = None
        self.on_fatal: Callable[[], None] = lambda: None

    def begin_at(self, position: Position) -> None:
        """Continue a stored run: call before the first submission."""
        self._position = position

    def submit(self, new_events: Sequence[events.Event], *plain: Change) -> Commit:
        """See Sink. `plain` are changes that nobody is told about, such as claims; they come last."""
        group = self._group_with(new_events, plain)
        self._left = self._left or group.ending
        return group.settled

    def _group_with(self, new_events: Sequence[events.Event], plain: Sequence[Change]) -> _Group:
        if not self._groups:
            if self.away:
                return self._kept(new_events, plain)
            self._groups.append(_Group([], [], Commit()))
            self._wake.set()
        group = self._groups[-1]
        for event in new_events:
            group.changes.extend(encode_event(event))
        group.changes.extend(plain)
        group.events.extend(new_events)
        return group

    def _kept(self, new_events: Sequence[events.Event], plain: Sequence[Change]) -> _Group:
        """Nobody waits for a store that is away, not even while it is just being tried again; only the end does."""
        group = _Group(
            [*(one for event in new_events for one in encode_event(event)), *plain], list(new_events), Commit()
        )
        if group.ending:
            self._groups.append(group)
            self._wake.set()
        else:
            self._unstored += group.changes
            self._settle(group)
        return group

    async def write_until_closed(self) -> None:
        """The writer. Returns after `close`, with everything stored or the loss recorded in `degraded`."""
        with anyio.CancelScope(shield=True):
            while True:
                with outlasting_cancellation():
                    await self._wait_for_work()
                await self._write_group()
                if self._closing and not self._groups:
                    break
            if self._unstored and self.away:
                self.degraded[-1] = replace(self.degraded[-1], lost=len(self._unstored))

    async def renew_lease(self, lease: float) -> None:
        """Renew the lease of `lease` seconds until cancelled, or until the owner has left."""
        while True:
            await self._clock.sleep(lease / 3)
            if self._left:
                return  # woken in the very step in which the run ended, before the cancellation came
            reached("lease.before_renewal")
            self.submit((), LeaseRenewed(self._clock.wall() + lease))

    def close(self) -> None:
        """Have the writer finish."""
        self._closing = True
        self._wake.set()

    @property
    def away(self) -> bool:
        """Whether the store is failing right now."""
        return bool(self.degraded) and self.degraded[-1].until is None

    async def _wait_for_work(self) -> None:
        """Wait for something to do: submissions, the close, or the time to try a failing store again."""
        if self._groups or self._closing:
            return
        self._wake = anyio.Event()
        if not self.away or self.fatal:
            await self._wake.wait()
            # One more turn of the loop: whoever is about to submit as well comes into the same transaction.
            await anyio.lowlevel.cancel_shielded_checkpoint()
            return
        with anyio.move_on_after(max(0.0, self._retry_at - self._clock.monotonic())):
            await self._wake.wait()

    async def _write_group(self) -> None:
        group = self._groups.popleft() if self._groups else _Group([], [], Commit())
        self._unstored += group.changes
        is_time = group.ending or not self.away or self._clock.monotonic() >= self._retry_at
        if self._unstored and self.fatal is None and is_time:
            await self._write_unstored()
        if group.ending:
            await self._try_a_last_time()
        self._settle(group)
        while self.away and self._groups and not self._groups[0].ending:
            waiting = self._groups.popleft()
            self._unstored += waiting.changes
            self._settle(waiting)

    async def _try_a_last_time(self) -> None:
        """Nothing later brings along what was left unwritten. A store that hangs had its time; a busy one gets it."""
        began = self._clock.monotonic()
        for tries, delay in enumerate(chain(LAST_TRIES_S, repeat(1.0))):
            is_busy, took = isinstance(self._error, StoreBusy), self._clock.monotonic() - began
            is_enough = took >= BUSY_PATIENCE_S if is_busy else took >= 1.0 or tries >= len(LAST_TRIES_S)
            if not self.away or self.fatal or is_enough:
                return
            with outlasting_cancellation():
                await self._clock.sleep(delay)
            await self._write_unstored()

    def _settle(self, group: _Group) -> None:
        """Tell what happened and let those go on who waited; what was refused for good never happened."""
        if self.fatal is None:
            for event in group.events:
                self._feed.publish(event)
            reached("told")
        group.settled.set()

    async def _write_unstored(self) -> None:
        limit, count = BATCH_LIMIT, 0
        while self._unstored:
            head = self._head(limit)
            error = await self._try_write(head)
            if isinstance(error, Conflict) and self.began and not self._strict:
                # No trying again helps. One by one, all but the change that cannot be stored get there.
                if limit == 1:
                    for _ in head:
                        self._unstored.popleft()
                    if len(apart := split_completion(head[0])) > 1:  # what was asked may be it, not the result
                        self._unstored.extendleft(reversed((*apart, *head[1:])))
                    else:
                        self._lost(error, len(head))
                limit = 1
                continue
            if error is not None:
                self._failed(error)
                return
            self._stored(head)
            count += len(head)
        self._recovered(count)

    def _head(self, limit: int) -> tuple[Change, ...]:
        """The first `limit` changes that are not stored, and those after them that follow from the last of them."""
        head = islice(self._unstored, limit)
        following = 0
        for number, change in enumerate(islice(self._unstored, limit, None), 1):
            if isinstance(change, stored.TasksAdded | stored.PolicyDecided):
                following = number
            elif type(change) is not stored.TaskCancelled:  # what a policy cancels stands before its decision
                break
        return (*head, *islice(self._unstored, limit, limit + following))

    def _stored(self, head: tuple[Change, ...]) -> None:
        claims = [type(change) for change in head].count(RunClaimed)
        self._position = Position(self._position.epoch + claims, self._position.next_seq + len(head))
        for _ in head:
            self._unstored.popleft()

    def _lost(self, error: Conflict, count: int) -> None:
        at, place = iso(self._clock.wall()), len(self.degraded) - self.away  # an outage goes on until all is caught up
        before = self.degraded[place - 1] if place else None
        if before is not None and before.lost and before.error == str(error):  # as for all that follows a lost change
            self.degraded[place - 1] = replace(before, until=at, lost=before.lost + count)
            return
        self.degraded.insert(place, Degradation(at, at, str(error), lost=count))
        self._log.error("change_not_stored", error=str(error))

    async def _try_write(self, head: tuple[Change, ...]) -> StoreError | None:
        batch = Batch(self._run_id, self._position.epoch, self._position.next_seq, head)
        while True:  # a write that a cancellation cut is unknown like others, and its store is not away
            reached("batch.before_write")
            with outlasting_cancellation():
                try:
                    await self._store.write(batch)
                except StoreError as error:
                    return error
                reached("batch.after_write")
                return None

    def _failed(self, error: StoreError) -> None:
        self._error = error
        refused = isinstance(error, Conflict) and not self.began
        forgotten = isinstance(error, StoreNotOpen) and not self.began and not self.degraded
        if isinstance(error, Fenced) or self._strict or refused or forgotten:
            self.fatal = error
            self.on_fatal()
            return
        self._retry_at = self._clock.monotonic() + self._retry_s
        self._retry_s = min(LAST_RETRY_S, self._retry_s * 2)
        if not self.away:
            at = iso(self._clock.wall())
            self.degraded.append(Degradation(at, None, str(error)))
            self._log.warning("store_degraded", error=str(error), unstored=len(self._unstored))
            self._feed.publish(events.StoreDegraded(at, str(error)))

    @property
    def began(self) -> bool:
        """Whether anything of the run is stored."""
        return self._position.next_seq > 1

    def _recovered(self, count: int) -> None:
        if not self.away:
            return
        at = iso(self._clock.wall())
        self.degraded[-1] = replace(self.degraded[-1], until=at)
        self._retry_s = FIRST_RETRY_S
        self._log.warning("store_recovered", changes=count)
        self._feed.publish(events.StoreRecovered(at, count))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run's next change goes: its epoch, to which each stored RunClaimed adds one, and its sequence number."""

    epoch: int = 0
    next_seq: int = 1


class EventSink(Protocol):
    """Where an execution hands on what happened."""

    @property
    def away(self) -> bool:
        """Whether what is handed on does not get written down right now, though it should."""
        ...

    def submit(self, new_events: Sequence[events.Event]) -> Commit:
        """Have `new_events` stored in one transaction, then told. Never waits. What it gives is set when all that is
        durable, or the store is known to be away.
        """
        ...


class UnstoredSink:
    """The sink of a run that is not written down."""

    away = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def submit(self, new_events: Sequence[events.Event]) -> Commit:
        """Tell it at once."""
        for event in new_events:
            self._feed.publish(event)
        return COMMITTED
