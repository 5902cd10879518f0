"""The ledger of an account: its limits, as all processes on one store keep them together. Pure.

The row of an account holds a bucket for each limit. A process books a block of calls at a time, at most the refill of
BLOCK_S seconds, so that it asks a few times a second however many calls it makes. Bookings queue up: one that does not
fit yet takes its units all the same, and may use them once they are refilled. So the processes take turns, and a
waiting process asks nothing. Whoever has used a block goes behind the others.

A process that has to wait leaves its priority in the row. As long as it waits, and for AHEAD_S afterwards, in which it
asks for its next block, those of a lower priority book nothing, and look again then. One that has died is waited for no
longer than that.

Nothing in a row belongs to a process: the units of a process that dies are refilled like used ones.

After a limit of the server that closes the account for long, one process sends one call, the probe, and the others wait
for its outcome. They wait for PROBE_S at most, since its process may die.

Money is a counter of the day in UTC, on which providers account and all hosts agree. The worst case of a call is
reserved for a grant that is used at once, and settled by what the call cost, on the day of the grant. What a dead
process had reserved stays counted on its day: its calls may have been made. If the calls that have ended leave no room
for another, the account is closed until midnight; if only those under way do not, it is asked again in a moment. A call
that may cost more than the whole limit is made on a day without any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from plait.events import USD_PER_DAY
from plait.runner.scheduling.own_limits import (
    CLOSED,
    PROBE,
    Demand,
    Grant,
    RateLimits,
    Reservation,
    TokenBucket,
    Units,
)

BLOCK_S = 0.1
"""The seconds of refill that a process books at once, unless a single call takes more."""
_LIMITS = frozenset({"requests", "tokens"})
LONGEST_HOLD_S = 0.25
"""The longest time for which a grant holds without another look at the row: the account may be closed meanwhile."""
SETTLES_S = 0.5
"""Seconds between two looks at an account whose money is reserved for calls under way, or which another process probes.
"""
AHEAD_S = 0.25
"""The seconds after its turn for which a process still comes before those of a lower priority. With LONGEST_HOLD_S,
after which those look again, this is no longer than BURST_S, so that no refill is lost if it asks for nothing more.
"""
PROBE_S = 300.0
"""The longest time for which the other processes wait for a probe."""
_KEPT_S = 3_600.0
"""Seconds for which a process is shown after its last booking, and reserved money may come back after the last
reservation or settlement.
"""
_DAY_S = 86_400
_ROUNDING = 1e-9
_STEP_S = 1.0
"""More than the time between two readings of the clock whose order is not that of their transactions."""
Row: TypeAlias = dict[str, Any]
"""The state of an account, as JSON: `seen`, the time of the last booking; `closed_until`; for `requests` and `tokens`
the server's own limit or None, the level and the time of the level, at which the last booking begins; and for display
the `limits` of the last booking, and the `users` with the requests and tokens that each has booked. With a limit of
money, `usd` has the `day` in UTC since 1970, the dollars of that day in `total`, the part of them that is `reserved`
for calls under way, and `at`, the time of the last change. `held` is there until a probe was accepted: the time until
which one is under way, or 0. `ahead` has the highest priority that waits, and the time until which it comes first.
"""


def book(demand: Demand, row: Row, now: float) -> Grant:
    """Book calls, one at least, at the Unix time `now`."""
    _follow_clock(row, now)
    learn(demand, row, now)
    opens = max(now, row.get("closed_until", 0.0))
    if others := _wait_for_others(demand, row, now):
        return Grant(others, Units(), CLOSED if opens > now else "")
    buckets = {name: _bucket(row, name, each, opens) for name, each in _each(demand.limits).items()}
    first, call = demand.first, demand.call
    more = 0
    if opens == now:
        size = {name: max(1e-9, getattr(call, name)) for name in buckets}
        blocks = (int(each.per_minute / 60 * BLOCK_S / size[name]) for name, each in buckets.items())
        more = max(0, min([demand.calls, *blocks]) - 1)
    units = Units(first.requests + more * call.requests, first.tokens + more * call.tokens)
    turn = max([opens, *(each.at for each in buckets.values())])
    begin = turn + max((each.wait(getattr(units, name), turn) for name, each in buckets.items()), default=0.0)
    for name, bucket in buckets.items():
        bucket.take(getattr(units, name), begin)
        row[name][1:] = bucket.level, bucket.at
    return _admit(demand, Grant(begin - now, units, CLOSED if opens > now else ""), row, now)


def learn(demand: Demand, row: Row, now: float) -> None:
    """Take into account what a process has learned since it booked last: units that it did not use, the server's own
    limits. `book` does so itself.
    """
    opens = max(now, row.get("closed_until", 0.0))
    for name, each in _each(demand.limits).items():
        bucket = _bucket(row, name, each, opens)
        bucket.take(-getattr(demand.unused, name), opens)
        if (allowance := demand.allowance) is not None:
            own = getattr(allowance, f"{name}_per_minute")
            row[name][0] = own or row[name][0]
            bucket.lower(own, getattr(allowance, f"{name}_left"), opens)
        row[name][1:] = bucket.level, bucket.at
    if demand.unused.usd:
        settle(Reservation(0, 0.0, demand.unused.usd, demand.day), 0.0, row, now)


def settle(reservation: Reservation, usd: float, row: Row, now: float) -> None:
    """Replace the dollars of the reservation by what the call cost. On a later day only what is more counts."""
    money = money_of_day(row, now)
    if money["day"] == reservation.day:
        money["total"] += usd - reservation.usd
        left = money["reserved"] - reservation.usd
        money["reserved"] = left if left > _ROUNDING else 0.0  # and not what the rounding of sums has left
    else:
        money["total"] += max(0.0, usd - reservation.usd)
    money["at"] = now


def _wait_for_others(demand: Demand, row: Row, now: float) -> float:
    """Return the seconds after which to look again whether a call of a higher priority waits; 0 if none does now."""
    priority, until = row.get("ahead", (0, 0.0))
    return until - now + LONGEST_HOLD_S if priority > demand.priority and until > now else 0.0


def _admit(demand: Demand, grant: Grant, row: Row, now: float) -> Grant:
    """Let a grant that is used at once wait for a probe under way, or be one itself, and reserve its dollars. If it has
    to wait for anything but another day, those of a lower priority wait too.
    """
    if grant.delay <= LONGEST_HOLD_S:
        if row.get("held", 0.0) > now:
            grant = replace(grant, delay=SETTLES_S)
        else:
            grant = _with_money(demand, grant, row, now)
            if "held" in row and grant.delay <= LONGEST_HOLD_S:
                row["held"] = now + PROBE_S
                grant = replace(grant, closed=PROBE)
    if grant.delay > 0 and grant.closed != USD_PER_DAY and not _wait_for_others(demand, row, now):
        row["ahead"] = demand.priority, now + grant.delay + AHEAD_S
    return grant


def _with_money(demand: Demand, grant: Grant, row: Row, now: float) -> Grant:
    """Reserve the dollars of the first call; let it wait if there are not enough."""
    limit = demand.limits.usd_per_day
    if limit is None:
        return grant
    if others := _wait_for_others(demand, row, now):
        return replace(grant, delay=others)
    money, usd = money_of_day(row, now), demand.first.usd
    if money["total"] + usd <= limit + _ROUNDING:
        money["total"] += usd
        money["reserved"] += usd
        money["at"] = now
        return replace(grant, units=replace(grant.units, usd=usd), day=money["day"])
    if money["total"] - money["reserved"] + usd <= limit + _ROUNDING and now - money["at"] < _KEPT_S:
        return replace(grant, delay=SETTLES_S)
    return replace(grant, delay=(money["day"] + 1) * _DAY_S - now, closed=USD_PER_DAY)


def money_of_day(row: Row, now: float) -> dict[str, Any]:
    """Return the dollars of the day in the row. A clock that was put back over midnight begins no other day."""
    day = int(now // _DAY_S)
    if row.get("usd", {}).get("day") not in {day, day + 1}:
        row["usd"] = {"day": day, "total": 0.0, "reserved": 0.0, "at": now}
    money: dict[str, Any] = row["usd"]
    return money


def note_user(user: str, demand: Demand, grant: Grant, row: Row, now: float) -> None:
    """Remember who has booked, and under which limits. Nothing depends on it."""
    row["limits"] = _each(demand.limits)
    if demand.limits.usd_per_day is not None:
        row["limits"]["usd"] = demand.limits.usd_per_day
    users: dict[str, list[float]] = row.setdefault("users", {})
    requests, tokens, _ = users.get(user, (0.0, 0.0, now))
    used = grant.units.requests - demand.unused.requests, grant.units.tokens - demand.unused.tokens
    users[user] = [max(0.0, requests + used[0]), max(0.0, tokens + used[1]), now]
    for gone in [name for name, (*_, at) in users.items() if now - at > _KEPT_S]:
        del users[gone]


def book_again(demand: Demand, grant: Grant, row: Row, now: float) -> Grant:
    """Return the grant, whose time has come, or another one if it has no units yet, if the account was closed
    meanwhile, or has no money.
    """
    if grant.units != Units() and row.get("closed_until", 0.0) <= now:
        return _admit(demand, replace(grant, delay=0.0, closed=""), row, now)
    return book(replace(demand, unused=grant.units, allowance=None), row, now)


def close(seconds: float, row: Row, now: float, *, probe: bool = False) -> None:
    """Let no process begin a call for `seconds`, or for longer if a process has said so; then first a `probe`."""
    if probe:
        row["held"] = 0.0
    row["closed_until"] = opens = max(row.get("closed_until", 0.0), now + seconds)
    for name in _LIMITS & row.keys():
        row[name][1:] = min(0.0, row[name][1]), max(row[name][2], opens)


def end_probe(accepted: bool, row: Row, now: float) -> None:
    """Let all processes begin calls after a probe, or another one send a probe if it was not `accepted`."""
    if "held" in row and row.get("closed_until", 0.0) <= now:
        row["held"] = 0.0
        if accepted:
            del row["held"]


def _follow_clock(row: Row, now: float) -> None:
    """Move the times in the row if the clock was put back: nobody waits for it to come round again."""
    back = row.get("seen", now) - now
    if back > _STEP_S:
        row["closed_until"] = row.get("closed_until", 0.0) - back
        row.pop("ahead", None)
        row |= {"held": row["held"] - back} if "held" in row else {}
        for name in _LIMITS & row.keys():
            row[name][2] -= back
    row["seen"] = now


def _each(limits: RateLimits) -> dict[str, float]:
    limits_by_name = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
    return {name: limit for name, limit in limits_by_name.items() if limit is not None}


def _bucket(row: Row, name: str, per_minute: float, opens: float) -> TokenBucket:
    """Return the bucket in the row, or a full one, under the limit that is given now."""
    bucket = TokenBucket(per_minute, opens)
    own, level, at = row.setdefault(name, [None, bucket.level, opens])
    bucket.per_minute = min(per_minute, own or per_minute)
    bucket.level, bucket.at = min(level, bucket.capacity), at
    return bucket
