"""The bookings of several processes in one row: the bound, the line, what headers teach, closures, deaths."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import RateLimits
from plait.backends.backend_protocol import Allowance
from plait.runner.scheduling.account_ledger import (
    AHEAD_S,
    BLOCK_S,
    LONGEST_HOLD_S,
    PROBE_S,
    SETTLES_S,
    Row,
    book,
    book_again,
    close,
    end_probe,
    learn,
    settle,
)
from plait.runner.scheduling.own_limits import (
    BURST_S,
    CLOSED,
    PROBE,
    CallSize,
    Demand,
    Grant,
    RateLimiter,
    Reservation,
    Units,
)

ONE = Units(1.0)


def asks(per_minute: float = 600, *, calls: int = 1, **more) -> Demand:
    return Demand(RateLimits(per_minute), ONE, ONE, calls, **more)


def emptied(now: float = 0.0, per_minute: float = 600) -> Row:
    """Return a row without a unit, as of `now`."""
    row: Row = {}
    book(asks(per_minute, unused=Units()), row, now)
    row["requests"][1] = 0.0
    return row


STEPS = st.lists(
    st.tuples(st.sampled_from(["book", "pass", "unused", "server", "close"]), st.floats(0, 3), st.integers(1, 40)),
    max_size=60,
)


@given(STEPS, st.integers(1, 6_000), st.integers(100, 300_000))
def test_no_window_grants_more_than_burst_refill_and_one_call(steps, requests, tokens) -> None:
    row: Row = {}
    limits, now, granted = RateLimits(requests, tokens), 0.0, []
    for what, seconds, amount in steps:
        row = json.loads(json.dumps(row))
        if what == "pass":
            now += seconds
        elif what == "close":
            close(seconds, row, now)
        else:
            size = Units(1.0, 20.0 * amount)
            unused = Units(*granted.pop()[1:]) if what == "unused" and granted else Units()
            allowance = Allowance(amount, amount, 100 * amount, 100 * amount) if what == "server" else None
            grant = book(Demand(limits, size, size, amount, unused, allowance), row, now)
            granted.append((now + grant.delay, grant.units.requests, grant.units.tokens))
    granted.sort()
    largest = max((each for _, _, each in granted), default=0)
    for first in range(len(granted)):
        calls = used = 0.0
        for at, of_requests, of_tokens in granted[first:]:
            calls, used, window = calls + of_requests, used + of_tokens, at - granted[first][0]
            burst = max(1, requests / 60 * BURST_S, requests / 60 * BLOCK_S)
            assert calls <= burst + requests / 60 * window + 1e-3
            assert used <= max(1, tokens / 60 * BURST_S) + tokens / 60 * window + largest + 1e-3


def test_processes_that_wait_take_turns() -> None:
    row = emptied()
    delays = [book(asks(calls=8), row, 0.0).delay for _ in range(4)]
    assert delays == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_fast_account_is_booked_by_the_block() -> None:
    row = emptied(per_minute=6_000)
    grant = book(asks(6_000, calls=50), row, 0.0)
    assert grant.units.requests == 6_000 / 60 * BLOCK_S
    assert book(asks(6_000, calls=3), row, 0.0).units.requests == 3


def test_a_block_is_no_larger_than_its_tokens_allow() -> None:
    call = Units(1.0, 500.0)
    grant = book(Demand(RateLimits(60_000, 600_000), call, call, 50), {}, 0.0)
    assert grant.units == Units(2.0, 1_000.0)


def test_what_a_dead_process_has_booked_is_there_again_after_its_time() -> None:
    row = emptied()
    for _ in range(5):  # all of them die
        book(asks(), row, 0.0)
    assert book(asks(), row, 0.0).delay == pytest.approx(0.6)
    assert book(asks(), row, 60.0).delay == 0


def test_unused_units_come_back() -> None:
    row = emptied()
    grant = book(asks(), row, 0.0)
    assert book(asks(unused=grant.units), row, 0.0).delay == pytest.approx(0.1)


def test_headers_lower_the_limit_and_never_raise_it() -> None:
    row = emptied()
    assert book(asks(allowance=Allowance(requests_per_minute=60)), row, 0.0).delay == pytest.approx(1.0)
    assert book(asks(), row, 10.0).delay == 0
    assert row["requests"][0] == 60, "the other processes learn it"
    assert book(asks(), row, 10.0).delay == pytest.approx(1.0)
    row = emptied()
    assert book(asks(allowance=Allowance(requests_per_minute=6_000, requests_left=100)), row, 0.0).delay == 0.1


def test_what_the_server_has_left_is_all_that_is_left() -> None:
    row: Row = {}
    assert book(asks(), row, 0.0).delay == 0
    assert book(asks(allowance=Allowance(requests_left=0)), row, 0.0).delay == pytest.approx(0.1)


def test_a_limit_that_its_user_raises_holds_from_the_next_booking_on() -> None:
    row = emptied()
    assert book(asks(60), row, 0.0).delay == pytest.approx(1.0)
    assert book(asks(6_000), row, 0.0).delay == pytest.approx(1.01), "behind the one before"


def test_nobody_calls_a_closed_account_and_then_one_after_the_other() -> None:
    row = emptied()
    close(30.0, row, 0.0)
    delays = [book(asks(calls=8), row, at).delay + at for at in (0.0, 10.0, 20.0)]
    assert delays == pytest.approx([30.1, 30.2, 30.3])
    close(5.0, row, 1.0)
    assert row["closed_until"] == 30.0, "no later word opens it sooner"


def test_a_grant_that_was_waited_for_is_void_if_the_account_was_closed_meanwhile() -> None:
    row, demand = emptied(), asks(6)
    grant = book(demand, row, 0.0)
    assert grant.delay == pytest.approx(10.0)
    assert book_again(demand, grant, row, 10.0) == replace(grant, delay=0.0)
    close(20.0, row, 5.0)
    assert book_again(demand, grant, row, 10.0).delay >= 15.0


def test_a_clock_that_was_put_back_holds_nobody_up() -> None:
    row = emptied(1e6)
    assert book(asks(), row, 1_000.0).delay == pytest.approx(0.1)
    close(30.0, row, 1_000.0)
    assert book(asks(), row, 500.0).delay == pytest.approx(30.1)
    assert book(asks(), row, 499.5).delay == pytest.approx(30.7), "two readings in the wrong order are no step"


# Priority: those of a lower one book nothing while one waits.


def test_while_a_process_waits_those_of_a_lower_priority_book_nothing() -> None:
    row = emptied()
    urgent = book(asks(priority=5), row, 0.0)
    assert urgent.delay == pytest.approx(0.1)
    other = book(asks(), row, 0.0)
    assert (other.units, other.closed) == (Units(), "")
    assert other.delay == pytest.approx(0.1 + AHEAD_S + LONGEST_HOLD_S)
    assert book(asks(priority=5), row, 0.1).delay == pytest.approx(0.1), "at its turn the first asks for the next"
    assert book_again(asks(), other, row, 0.3).units == Units()
    last = book_again(asks(), other, row, 0.6)
    assert (last.delay, last.units) == (0, ONE), "nobody waits any more: there is no limit for those of a lower one"
    assert AHEAD_S + LONGEST_HOLD_S <= BURST_S, "no refill is lost meanwhile"


def test_those_of_the_same_priority_take_turns_before_those_of_a_lower_one() -> None:
    row = emptied()
    delays = [book(asks(priority=each), row, 0.0).delay for each in (1, 5, 5)]
    assert delays == pytest.approx([0.1, 0.2, 0.3])
    assert book(asks(priority=1), row, 0.0).units == Units(), "the first had its turn: now it waits"
    assert book(asks(priority=7), row, 0.0).delay == pytest.approx(0.4)
    book(asks(priority=1), row, 0.0)
    assert row["ahead"][0] == 7


def test_a_process_that_waited_and_died_is_waited_for_no_longer_than_its_turn() -> None:
    row = emptied()
    book(asks(60, priority=5), row, 0.0)
    other = book(asks(60), row, 0.0)
    assert book_again(asks(60), other, row, other.delay).units == ONE


def test_a_process_that_need_not_wait_holds_nobody_up() -> None:
    row: Row = {}
    assert book(asks(priority=5), row, 0.0).delay == 0
    assert book(asks(), row, 0.0).units == ONE


def test_a_closed_account_is_told_to_those_of_a_lower_priority_too() -> None:
    row = emptied()
    close(30.0, row, 0.0)
    book(asks(priority=5), row, 1.0)
    other = book(asks(), row, 1.0)
    assert (other.closed, other.units) == ("closed", Units())
    assert 29.0 < other.delay < 30.0


def test_a_clock_that_was_put_back_ends_the_wait_for_a_higher_priority() -> None:
    row = emptied(1_000.0)
    book(asks(priority=5), row, 1_000.0)
    assert book(asks(), row, 500.0).units == ONE


def closed_for_long() -> Row:
    row = emptied()
    close(3_600.0, row, 0.0, probe=True)
    return row


def test_one_process_probes_an_account_that_is_open_again_and_the_others_wait() -> None:
    row, demand = closed_for_long(), asks(60_000, calls=8)
    first, second = (book(demand, row, 0.0) for _ in range(2))
    first = book_again(demand, first, row, 3_601.0)
    assert (first.closed, first.delay) == (PROBE, 0)
    second = book_again(demand, second, row, 3_601.1)
    assert (second.delay, second.closed) == (SETTLES_S, "")
    new = book(demand, row, 3_602.0)
    assert (new.closed, new.delay) == ("", SETTLES_S)
    end_probe(True, row, 3_603.0)
    assert (book_again(demand, second, row, 3_604.0).delay, book(demand, row, 3_604.0).closed) == (0, "")


def test_a_probe_that_is_refused_closes_the_account_and_one_that_tells_nothing_is_followed_by_another() -> None:
    row, demand = closed_for_long(), asks(60_000)
    assert book(demand, row, 3_601.0).closed == PROBE
    end_probe(False, row, 3_602.0)
    assert book(demand, row, 3_602.0).closed == PROBE
    close(3_600.0, row, 3_603.0, probe=True)
    end_probe(True, row, 3_603.0)
    assert book(demand, row, 3_604.0).closed == CLOSED, "accepted too early to count"
    assert book(demand, row, 7_300.0).closed == PROBE


def test_the_probe_of_a_dead_process_is_waited_for_no_longer_than_its_time() -> None:
    row, demand = closed_for_long(), asks(60_000)
    assert book(demand, row, 3_601.0).closed == PROBE
    assert book(demand, row, 3_600.0 + PROBE_S).delay == SETTLES_S
    assert book(demand, row, 3_602.0 + PROBE_S).closed == PROBE


# Money: a counter of the day.

DAY = 86_400.0


def pays(usd: float, limit: float = 10.0) -> Demand:
    return Demand(RateLimits(usd_per_day=limit), Units(usd=usd))


def reserved(grant: Grant) -> Reservation:
    return Reservation(0, 0.0, grant.units.usd, grant.day)


PAYMENTS = st.lists(
    st.tuples(st.sampled_from(["book", "settle", "die", "unused", "pass"]), st.floats(0, 1), st.floats(0, 40_000)),
    max_size=80,
)


@given(PAYMENTS, st.floats(1, 20))
def test_no_day_costs_more_than_its_limit(steps, limit) -> None:
    row: Row = {}
    bill: dict[int, float] = {}
    underway: list[Grant] = []
    now = 20 * DAY
    for what, share, seconds in steps:
        row = json.loads(json.dumps(row))
        if what == "pass":
            now += seconds
        elif what == "book":
            grant = book(pays(share * limit, limit), row, now)
            if grant.delay == 0:
                underway.append(grant)
                bill[grant.day] = bill.get(grant.day, 0.0) + grant.units.usd  # while it is under way
        elif underway:
            grant = underway.pop()
            if what == "settle":
                settle(reserved(grant), share * grant.units.usd, row, now)
                bill[grant.day] -= (1 - share) * grant.units.usd
            elif what == "unused":
                unused = Units(usd=grant.units.usd)
                learn(replace(pays(0, limit), unused=unused, day=grant.day), row, now)
                bill[grant.day] -= grant.units.usd
        assert all(cost <= limit + 1e-6 for cost in bill.values())
        assert bill.get(int(now // DAY), 0.0) <= row.get("usd", {}).get("total", 0.0) + 1e-6


def test_an_account_without_money_is_closed_until_midnight() -> None:
    row: Row = {}
    now = 20 * DAY + 1_000.0
    grant = book(pays(6.0), row, now)
    settle(reserved(grant), 5.0, row, now)
    closed = book(pays(6.0), row, now)
    assert (closed.closed, closed.delay, closed.units.usd) == ("usd_per_day", DAY - 1_000.0, 0.0)
    assert book(pays(5.0), row, now).delay == 0, "smaller calls still fit"
    again = book_again(pays(6.0), closed, row, 21 * DAY)
    assert (again.closed, again.delay, again.units.usd, again.day) == ("", 0, 6.0, 21)
    assert book(pays(6.0, limit=20.0), row, 21 * DAY).delay == 0, "a higher limit holds at once"


def test_nothing_is_reserved_after_the_last_call() -> None:
    row: Row = {}
    grants = [book(pays(0.1), row, 20 * DAY) for _ in range(3)]
    for grant in grants:
        settle(reserved(grant), 0.05, row, 20 * DAY + 1)
    assert row["usd"]["reserved"] == 0, "no matter how sums are rounded"


def test_money_reserved_for_calls_under_way_is_waited_for() -> None:
    row: Row = {}
    now = 20 * DAY
    grant = book(pays(9.0), row, now)
    waits = book(pays(6.0), row, now)
    assert (waits.closed, waits.delay) == ("", SETTLES_S)
    settle(reserved(grant), 1.0, row, now + 1)
    assert book_again(pays(6.0), waits, row, now + 2).units.usd == 6.0
    assert row["usd"]["total"] == 7.0
    lost = book(pays(6.0), row, now + 2 + 3_600)
    assert lost.closed == "usd_per_day", "nobody settles any more: the processes have died"


def test_money_that_a_higher_priority_waits_for_is_not_spent_by_a_lower_one() -> None:
    row: Row = {}
    now = 20 * DAY
    grant = book(pays(9.0), row, now)
    urgent = replace(pays(6.0), priority=5)
    waits = book(urgent, row, now)
    assert (waits.delay, waits.closed) == (SETTLES_S, "")
    other = replace(pays(1.0), first=Units(1.0, usd=1.0))  # has its request already
    assert book_again(other, Grant(0.0, ONE), row, now + 0.25).units.usd == 0
    settle(reserved(grant), 1.0, row, now + 2)
    assert book_again(urgent, waits, row, now + 2).units.usd == 6.0
    assert book_again(other, Grant(0.0, ONE), row, now + 3).units.usd == 1.0


def test_a_call_that_waits_for_another_day_holds_up_no_smaller_one() -> None:
    row: Row = {}
    settle(reserved(book(pays(6.0), row, 20 * DAY)), 6.0, row, 20 * DAY)
    assert book(replace(pays(6.0), priority=5), row, 20 * DAY).closed == "usd_per_day"
    assert book(pays(1.0), row, 20 * DAY).units.usd == 1.0


def test_a_call_that_ends_on_another_day_counts_on_its_own() -> None:
    row: Row = {}
    grant = book(pays(9.0), row, 21 * DAY - 5)
    book(pays(2.0), row, 21 * DAY)
    settle(reserved(grant), 1.0, row, 21 * DAY + 5)
    assert row["usd"]["total"] == 2.0
    settle(reserved(grant), 9.5, row, 21 * DAY + 5)
    assert row["usd"]["total"] == 2.5, "what was not reserved counts"


def test_a_clock_that_was_put_back_begins_no_other_day() -> None:
    row: Row = {}
    book(pays(9.0), row, 21 * DAY)
    assert book(pays(9.0), row, 21 * DAY - 1).delay > 0
    assert book(pays(9.0), row, 5 * DAY).delay == 0, "but a wrong clock holds nobody up for days"


# The side of a process: what it asks for, and what becomes of its units.


def granting(requests: float = 600, tokens: float | None = None) -> RateLimiter:
    return RateLimiter(RateLimits(requests, tokens), 0.0, 100, is_granted=True)


def test_a_process_calls_nothing_that_it_was_not_granted() -> None:
    limiter = granting()
    assert limiter.wait(CallSize(0), 50.0) == float("inf")
    limiter.grant(Units(2.0), 50.0)
    assert limiter.wait(CallSize(0), 50.0) == 0
    limiter.reserve(CallSize(0), 50.0)
    limiter.reserve(CallSize(0), 50.0)
    assert limiter.wait(CallSize(0), 50.0) == float("inf")


def test_units_that_are_not_used_in_time_go_back() -> None:
    limiter = granting()
    limiter.grant(Units(2.0), 0.0)
    limiter.reserve(CallSize(0), 0.1)
    assert limiter.wait(CallSize(0), BURST_S + 0.1) == float("inf")
    assert limiter.demand(CallSize(0), 1, 1.0).unused == Units(1.0)
    assert limiter.demand(CallSize(0), 1, 1.0).unused == Units(), "once"
    limiter.grant(Units(3.0), 1.0, in_time=False)
    assert limiter.demand(CallSize(0), 1, 1.0).unused == Units(3.0)


def test_dollars_that_are_left_over_keep_their_day_and_end_with_it() -> None:
    limiter, call = RateLimiter(RateLimits(600, usd_per_day=9.0), 0.0, is_granted=True), CallSize(0, 3.0)
    limiter.grant(Units(1.0, usd=3.0), 0.0, 20)
    limiter.grant(Units(1.0), 0.0, in_time=False)  # without dollars, and so without a day
    assert limiter.reserve(call, 0.0) == Reservation(0, 0.0, 3.0, 20)
    limiter.grant(Units(1.0, usd=2.0), 0.1, 20)
    limiter.grant(Units(1.0, usd=1.0), 0.2, 21)
    assert limiter.wait(call, 0.2) == float("inf"), "two of three dollars were of the day before"
    assert limiter.demand(call, 1, 0.2).first.usd == 2.0
    limiter.grant(Units(usd=2.0), 0.3, 21)
    assert limiter.take_unused_money() == Reservation(0, 0.0, 3.0, 21)
    assert limiter.take_unused_money().usd == 0


def test_a_call_is_settled_by_what_it_used() -> None:
    limiter = granting(600, 60_000)
    demand = limiter.demand(CallSize(1_000), 3, 0.0)
    assert demand.first == demand.call == Units(1.0, 400.0)
    assert demand.calls == 3
    limiter.grant(demand.first, 0.0)
    limiter.settle(limiter.reserve(CallSize(1_000), 0.0), 500, 200, 0.1)
    debt = limiter.demand(CallSize(0), 1, 0.1)
    assert debt.first.tokens == pytest.approx(debt.call.tokens + 300), "more than expected is asked for next time"


def test_what_the_server_reports_is_told_once() -> None:
    limiter, allowance = granting(), Allowance(60, 3)
    limiter.lower(allowance, 0.0)
    assert limiter.demand(CallSize(0), 1, 0.0).allowance == allowance
    assert limiter.demand(CallSize(0), 1, 0.0).allowance is None
