"""`Checkpointer`: the only writer to the store.

All waiting submissions go into one transaction (group commit): while the store writes one batch, the next one gathers.
`submit` is a plain function and never waits, so no cancellation can interrupt a submission halfway; only the wait for
the returned `Commit` can be cancelled. The writer task runs in a shielded scope, outside every scope that the writer
serves, and after `close` still writes the remaining changes. The writer does the same if every task of the event loop
is cancelled, because the release of an interrupted run has to be stored.

When the store fails, the unstored changes stay in memory, in order. Commits are then set without waiting for the store,
and the writer retries with growing delays. Batches carry sequence numbers, so a repeated write is harmless: after an
exception the result of a write is unknown, not failed.

A store on a server (`ServerStore`) may come back without its last changes. It then answers with Gap, and the writer
writes again what it has kept (kept_changes.py). If too little is kept, the gap counts as an outage: changes stay in
memory, and what is still missing at the end is reported as lost.
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
from plait.persistence.errors import Conflict, Fenced, Gap, StoreBusy, StoreError, StoreNotOpen
from plait.persistence.failpoints import reached
from plait.persistence.protocol import Store, server_of
from plait.persistence.records import RunRecord
from plait.persistence.rules import split_completion
from plait.runner.asyncio_cancellation import outlasting_cancellation
from plait.runner.clock import Clock, iso
from plait.runner.domain import events
from plait.runner.domain.result import Degradation
from plait.runner.engine.commit import COMMITTED, Commit
from plait.runner.engine.feed import Feed
from plait.runner.engine.kept_changes import KeptChanges
from plait.runner.log import logger
from plait.runner.state.codec import encode_event

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
"""Most changes in one transaction, so that the writer catches up in steps after a long outage."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Submissions that are written together."""

    changes: list[Change]
    events: list[events.Event]
    """The events to publish once the changes are stored."""
    commit: Commit
    """The commit returned for each of the submissions."""

    @property
    def ending(self) -> bool:
        """True if the group ends the run. The group is then written at once, because no later write follows."""
        return bool(self.changes) and type(self.changes[-1]) is RunReleased


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
        self._owner_id = ""
        self._unstored: deque[Change] = deque()
        """Changes not known to be stored, oldest first. The first change has the number `next_seq`."""
        self._groups: deque[_Group] = deque()
        """Groups waiting for the store, oldest first. Only the last group takes further submissions."""
        self._wake = anyio.Event()
        self._closing = False
        self._run_ended = False
        """True once the release of the run is submitted: no lease renewal may follow."""
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S
        self._error: StoreError | None = None
        self._kept = None if server_of(store) is None else KeptChanges()
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

    def begin_at(self, position: WritePosition, owner_id: str) -> None:
        """Continue a stored run at `position`, as `owner_id`. To be called before the first submission."""
        self._position, self._owner_id = position, owner_id

    def submit(self, new_events: Sequence[events.Event], *plain: Change) -> Commit:
        """See EventSink. `plain` changes, such as claims, have no events and are written last."""
        group = self._group_with(new_events, plain)
        self._run_ended = self._run_ended or group.ending
        return group.commit

    def _group_with(self, new_events: Sequence[events.Event], plain: Sequence[Change]) -> _Group:
        if not self._groups:
            if self.away:
                return self._keep_in_memory(new_events, plain)
            self._groups.append(_Group([], [], Commit()))
            self._wake.set()
        group = self._groups[-1]
        for event in new_events:
            group.changes.extend(encode_event(event))
        group.changes.extend(plain)
        group.events.extend(new_events)
        return group

    def _keep_in_memory(self, new_events: Sequence[events.Event], plain: Sequence[Change]) -> _Group:
        """Keep the changes in memory while the store is away, and set the commit at once, even during a retry. Only the
        group that ends the run waits for the store.
        """
        group = _Group(
            [*(one for event in new_events for one in encode_event(event)), *plain], list(new_events), Commit()
        )
        if group.ending:
            self._groups.append(group)
            self._wake.set()
        else:
            self._unstored += group.changes
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
                self.degraded[-1] = replace(self.degraded[-1], lost=len(self._unstored))

    async def renew_lease(self, lease: float) -> None:
        """Renew the lease of `lease` seconds until cancelled, or until the release of the run is submitted."""
        while True:
            await self._clock.sleep(lease / 3)
            if self._run_ended:
                return  # woken in the same step in which the run ended, before the cancellation
            reached("lease.before_renewal")
            self.submit((), LeaseRenewed(self._clock.wall() + lease))

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
        group = self._groups.popleft() if self._groups else _Group([], [], Commit())
        self._unstored += group.changes
        is_time = group.ending or not self.away or self._clock.monotonic() >= self._retry_at
        if self._unstored and self.fatal is None and is_time:
            await self._write_unstored()
        if group.ending:
            await self._retry_at_end()
        self._publish(group)
        while self.away and self._groups and not self._groups[0].ending:
            waiting = self._groups.popleft()
            self._unstored += waiting.changes
            self._publish(waiting)

    async def _retry_at_end(self) -> None:
        """Retry at the end of the run, because no later write follows: up to BUSY_PATIENCE_S seconds if the store is
        busy, up to SERVER_PATIENCE_S seconds if the store is a server; otherwise for the waits of LAST_TRIES_S, but for
        at most about a second.
        """
        began = self._clock.monotonic()
        for tries, delay in enumerate(chain(LAST_TRIES_S, repeat(1.0))):
            took, patience = self._clock.monotonic() - began, self._patience()
            is_enough = took >= 1.0 or tries >= len(LAST_TRIES_S) if patience is None else took >= patience
            if not self.away or self.fatal or is_enough:
                return
            if patience is not None and tries == len(LAST_TRIES_S):
                self._log.warning("waiting_for_store", seconds=patience, unstored=len(self._unstored))
                self._feed.publish(events.StoreAwaited(iso(self._clock.wall()), len(self._unstored), patience))
            with outlasting_cancellation(), anyio.CancelScope() as self._pause:
                await self._clock.sleep(delay)
            await self._write_unstored()

    def _patience(self) -> float | None:
        """Return the longest wait of the end for the store, in seconds; None for the short waits of LAST_TRIES_S."""
        if isinstance(self._error, StoreBusy):
            return BUSY_PATIENCE_S
        is_gap = isinstance(self._error, Gap)  # nothing that is still to come would close the gap
        return SERVER_PATIENCE_S if self._kept is not None and self._waits and not is_gap else None

    def _publish(self, group: _Group) -> None:
        """Publish the events and set the commit of the group. After a fatal error no events are published."""
        if self.fatal is None:
            for event in group.events:
                self._feed.publish(event)
            reached("events.published")
        group.commit.set()

    async def _write_unstored(self) -> None:
        limit, count = BATCH_LIMIT, 0
        while self._unstored:
            head = self._next_batch(limit)
            error = await self._try_write(head)
            if isinstance(error, Gap) and self._kept is not None and self.began and not self._strict:
                error = await self._close_gap(error, self._kept)
                if error is None:
                    continue
                self._record_failure(error)
                return
            if isinstance(error, Conflict) and self.began and not self._strict:
                # A retry cannot help. Written singly, all changes except the refused change are stored.
                if limit == 1:
                    for _ in head:
                        self._unstored.popleft()
                    if len(apart := split_completion(head[0])) > 1:  # maybe only the prompt is refused
                        self._unstored.extendleft(reversed((*apart, *head[1:])))
                    else:
                        self._record_loss(error, len(head))
                limit = 1
                continue
            if error is not None:
                self._record_failure(error)
                return
            self._record_stored(head)
            count += len(head)
        self._record_recovery(count)

    async def _close_gap(self, gap: Gap, kept: KeptChanges) -> StoreError | None:
        """Put the changes that the store has lost before the unstored changes. Return None, or the error if the store
        cannot be read, belongs to another owner, or has lost more than is kept.
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
        claims = [change.owner.owner_id for change in again if type(change) is RunClaimed]
        epoch = self._position.epoch - len(claims)
        if record is not None and (record.epoch > epoch or (not claims and _owner_id(record) != self._owner_id)):
            return Fenced(
                f"run {self._run_id} has another owner in a store that has lost changes of this process; resume the "
                "run to take over"
            )
        self.on_gap()
        self._note_outage(gap)
        self._log.warning("changes_written_again", next_seq=next_seq, changes=len(again))
        self._unstored.extendleft(reversed(again))
        self._position = WritePosition(epoch, next_seq)
        return None

    def _next_batch(self, limit: int) -> tuple[Change, ...]:
        """Return the first `limit` unstored changes, and the following changes that belong to the last of the first."""
        head = islice(self._unstored, limit)
        following = 0
        for number, change in enumerate(islice(self._unstored, limit, None), 1):
            if isinstance(change, stored.TasksAdded | stored.PolicyDecided):
                following = number
            elif type(change) is not stored.TaskCancelled:  # cancellations precede the decision of the policy
                break
        return (*head, *islice(self._unstored, limit, limit + following))

    def _record_stored(self, head: tuple[Change, ...]) -> None:
        claims = [type(change) for change in head].count(RunClaimed)
        if self._kept is not None:
            self._kept.add(self._position.next_seq, head, self._clock.monotonic())
        self._position = WritePosition(self._position.epoch + claims, self._position.next_seq + len(head))
        for _ in head:
            self._unstored.popleft()

    def _record_loss(self, error: Conflict, count: int) -> None:
        at, place = iso(self._clock.wall()), len(self.degraded) - self.away  # an open outage stays last
        before = self.degraded[place - 1] if place else None
        if before is not None and before.lost and before.error == str(error):  # likely a consequence of the last loss
            self.degraded[place - 1] = replace(before, until=at, lost=before.lost + count)
            return
        self.degraded.insert(place, Degradation(at, at, str(error), lost=count))
        self._log.error("change_not_stored", error=str(error))

    async def _try_write(self, head: tuple[Change, ...]) -> StoreError | None:
        batch = Batch(self._run_id, self._position.epoch, self._position.next_seq, head)
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
        if isinstance(error, Fenced) or self._strict or refused or never_opened:
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
        self._log.warning("store_degraded", error=str(error), unstored=len(self._unstored))
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


def _owner_id(record: RunRecord) -> str | None:
    return None if record.owner is None else record.owner.owner_id


@dataclass(frozen=True, slots=True)
class WritePosition:
    """The epoch and the sequence number of a run's next change."""

    epoch: int = 0
    """The number of stored RunClaimed changes."""
    next_seq: int = 1
    """The sequence number of the next change."""


class EventSink(Protocol):
    """A receiver of the events of an execution."""

    @property
    def away(self) -> bool:
        """True while events are not stored because the store fails."""
        ...

    def submit(self, new_events: Sequence[events.Event]) -> Commit:
        """Submit `new_events` for storage in one transaction and for publication afterwards. Never waits.

        Returns a commit that is set once all events are durable, or the store is known to be away.
        """
        ...


class UnstoredSink:
    """The sink of a run without a store."""

    away = False

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def submit(self, new_events: Sequence[events.Event]) -> Commit:
        """Publish `new_events` at once. Return a commit that is set already."""
        for event in new_events:
            self._feed.publish(event)
        return COMMITTED
