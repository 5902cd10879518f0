"""The ledger of an account in the store, where all processes on the store find it: see `account_ledger`.

A store offers it by running a transaction of several statements (`TransactingStore`), as SQLiteStore and PostgresStore
do. The clock of the store counts, so that the clocks of the hosts may differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from socket import gethostname
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import anyio

from plait.clock_and_ids import Clock
from plait.errors import StoreError
from plait.persistence import tables
from plait.persistence.tables import Reading
from plait.program_log import logger
from plait.runner.scheduling.account_ledger import (
    LONGEST_HOLD_S,
    SETTLES_S,
    Row,
    book,
    book_again,
    close,
    end_probe,
    learn,
    note_user,
    settle,
)
from plait.runner.scheduling.own_limits import (
    PROBE,
    CallSize,
    Demand,
    Grant,
    OnClosed,
    RateLimiter,
    Reservation,
    Units,
)

T = TypeVar("T")
Change: TypeAlias = Callable[[Row, float], T]


@runtime_checkable
class TransactingStore(Protocol):
    """A store that several processes share, and that keeps accounts for them. A `Store` need not be one."""

    async def transact(self, writing: Reading[T]) -> T:
        """Run the statements of `writing` in one transaction, and return its result. Raises StoreError."""
        ...


def change(account: str, function: Change[T]) -> Reading[T]:
    """Change the row of the account by `function`, which gets the row and the Unix time, and return its result."""
    while not (rows := list((yield tables.GET_ACCOUNT, (account,)))):
        yield tables.ADD_ACCOUNT, (account, "{}")
    [(_, state, now)] = rows
    row: Row = json.loads(state)
    result = function(row, now)
    yield tables.SET_ACCOUNT, (json.dumps(row), account)
    return result


def list_accounts() -> Reading[dict[str, dict[str, Any]]]:
    """Read all accounts, by name."""
    return {account: json.loads(state) for account, state, _ in (yield tables.GET_ACCOUNT, (None,))}


class StoredLedger:
    """The ledger of `account` in `store`. Implements `own_limits.Ledger`."""

    def __init__(self, store: TransactingStore, account: str, clock: Clock) -> None:
        self._store = store
        self._account = account
        self._clock = clock
        self._is_away = False
        self._missed: list[Change[object]] = []
        """What the row has still to learn, because the store was away."""
        self._user = f"{gethostname()}:{os.getpid()}"

    async def fill(
        self, limiter: RateLimiter, size: CallSize, calls: int, on_closed: OnClosed, priority: int = 0
    ) -> None:
        demand = limiter.demand(size, calls, self._clock.monotonic(), priority)
        # Dollars stay reserved, since a commit that raised may have given them back.
        learned = partial(learn, replace(demand, unused=replace(demand.unused, usd=0.0)))
        grant = await self._change(partial(self._book, demand, None), learned) or _alone(demand)
        in_time = False
        try:
            if grant.delay > 0 and not grant.closed:
                on_closed(self._clock.wall() + grant.delay, "")
            while grant.delay > LONGEST_HOLD_S:
                if grant.closed:
                    on_closed(self._clock.wall() + grant.delay, grant.closed)
                await self._clock.sleep(grant.delay)
                demand = replace(demand, unused=grant.units, allowance=None)
                grant = await self._change(partial(self._book, demand, grant)) or Grant(0.0, grant.units)
            if grant.delay > 0:
                await self._clock.sleep(grant.delay)
            if grant.closed == PROBE:
                on_closed(self._clock.wall(), PROBE)
            in_time = True
        finally:
            limiter.grant(grant.units, self._clock.monotonic(), grant.day, in_time=in_time)

    def _book(self, demand: Demand, before: Grant | None, row: Row, now: float) -> Grant:
        grant = book(demand, row, now) if before is None else book_again(demand, before, row, now)
        note_user(self._user, demand, grant, row, now)
        return grant

    async def close(self, until: float, *, probe: bool = False) -> None:
        def until_then(row: Row, now: float) -> None:
            close(until - self._clock.wall(), row, now, probe=probe)

        await self._change(until_then, until_then)

    async def end_probe(self, *, accepted: bool) -> None:
        await self._change(partial(end_probe, accepted))

    async def settle(self, reservation: Reservation, usd: float) -> None:
        # As above, only a cost above the reservation is told again.
        more = partial(settle, replace(reservation, usd=0.0), max(0.0, usd - reservation.usd))
        await self._change(partial(settle, reservation, usd), more)

    async def _change(self, function: Change[T], missed: Change[object] | None = None) -> T | None:
        """Return the result of the function; None if the store is away: `missed` is then done before the next one. What
        the row was told is known here too, also by a cancelled call: what it was granted goes back.
        """
        batch, self._missed = self._missed, []

        def both(row: Row, now: float) -> T:
            for each in batch:
                each(row, now)
            return function(row, now)

        result: T | None = None
        try:
            with anyio.CancelScope(shield=True):
                result = await self._store.transact(change(self._account, both))
        except StoreError as error:
            if not self._is_away:
                logger().warning("account_unreachable", account=self._account, error=str(error))
            self._is_away = True
            self._missed = [*batch, *self._missed, *([] if missed is None else [missed])]
            return None
        self._is_away = False
        return result


def _alone(demand: Demand) -> Grant:
    """Return a grant for the first call, at the full rate of the account, as if there were no other process; without
    money, which may be spent.
    """
    limits, first = demand.limits, demand.first
    delay = 60 * max(
        first.requests / (limits.requests_per_minute or 1e9), first.tokens / (limits.tokens_per_minute or 1e9)
    )
    delay = delay if limits.usd_per_day is None else max(delay, SETTLES_S)
    return Grant(delay, Units(first.requests, first.tokens))
