"""The arithmetic of rate limits: what any order of calls, late answers and refunds may never exceed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import RateLimits
from plait.backends.backend_protocol import Allowance
from plait.runner.scheduling.own_limits import BURST_S, CallSize, RateLimiter, TokenBucket

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "give back", "pass", "server"]),
        st.floats(0, 5, allow_nan=False),
        st.integers(0, 5_000),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 6_000), st.integers(1, 300_000))
def test_no_window_takes_more_than_burst_refill_and_one_call(steps, requests, tokens):
    limiter = RateLimiter(RateLimits(requests, tokens), 0.0, most_output=50)
    now, under_way, taken = 0.0, [], []
    for what, seconds, amount in steps:
        if what == "pass":
            now += seconds
        elif what == "begin":
            now += limiter.wait(CallSize(amount), now)
            assert limiter.wait(CallSize(amount), now) <= 1e-6
            under_way.append(limiter.reserve(CallSize(amount), now))
            taken.append((now, 1, under_way[-1].tokens))
        elif what == "server":
            limiter.lower(Allowance(amount or None, amount, amount or None, amount), now)
        elif under_way:
            call = under_way.pop(amount % len(under_way))
            if what == "end":
                real = amount % int(call.tokens + 1)  # within the estimate
                limiter.settle(call, real, 0, now)
                taken.append((now, 0, real - call.tokens if real else 0))
            else:
                limiter.give_back(call, now)
                taken.append((now, -1, -call.tokens))
    largest = max((units for _, _, units in taken), default=0)
    for first in range(len(taken)):
        calls = used = 0.0
        for at, requests_taken, tokens_taken in taken[first:]:
            calls, used = calls + requests_taken, used + tokens_taken
            window = at - taken[first][0]
            assert calls <= max(1, requests / 60 * BURST_S) + requests / 60 * window + 1e-6
            assert used <= max(1, tokens / 60 * BURST_S) + tokens / 60 * window + largest + 1e-3


def test_a_call_begins_exactly_when_its_wait_is_over():
    limiter = RateLimiter(RateLimits(60), 100.0)
    limiter.reserve(CallSize(0), 100.0)
    assert limiter.wait(CallSize(0), 100.2) == pytest.approx(0.8)
    assert limiter.wait(CallSize(0), 101.0) == 0


def test_an_idle_hour_saves_half_a_second_of_calls():
    limiter = RateLimiter(RateLimits(600), 0.0)
    begun = 0
    while not limiter.wait(CallSize(0), 3600.0):
        limiter.reserve(CallSize(0), 3600.0)
        begun += 1
    assert begun == 5


def test_tokens_are_reserved_by_estimate_and_settled_by_usage():
    limiter = RateLimiter(RateLimits(tokens_per_minute=6_000), 0.0)
    call = limiter.reserve(CallSize(1_000), 0.0)
    assert call.tokens == 1_000 * 0.30 + 1_024
    assert limiter.wait(CallSize(1_000), 0.0) == pytest.approx(13.24)  # the debt, and a full bucket
    limiter.settle(call, 240, 10, 0.0)
    assert limiter.wait(CallSize(1_000), 0.0) == pytest.approx(2.5)


def test_estimates_learn_from_usage():
    limiter = RateLimiter(RateLimits(tokens_per_minute=60_000), 0.0)
    for at in range(40):
        limiter.settle(limiter.reserve(CallSize(1_000), at), 200, 100, at)
    assert limiter.estimate(1_000) == pytest.approx(300, rel=0.01)


def test_a_backends_own_limit_bounds_the_first_estimate():
    assert RateLimiter(RateLimits(tokens_per_minute=600), 0.0, most_output=100).estimate(0) == 100


def test_a_call_without_usage_keeps_its_estimate():
    limiter = RateLimiter(RateLimits(tokens_per_minute=6_000), 0.0)
    call = limiter.reserve(CallSize(0), 0.0)
    before = limiter.wait(CallSize(0), 0.0)
    limiter.settle(call, 0, 0, 0.0)
    assert limiter.wait(CallSize(0), 0.0) == before > 0


def test_a_returned_call_costs_nothing():
    limiter = RateLimiter(RateLimits(60, 600), 0.0)
    limiter.give_back(limiter.reserve(CallSize(10), 0.0), 0.0)
    assert limiter.wait(CallSize(10), 0.0) == 0


def test_the_server_lowers_the_rate_and_never_raises_it():
    bucket = TokenBucket(600, 0.0)
    bucket.lower(60, None, 0.0)
    assert (bucket.per_minute, bucket.level) == (60, 1)
    bucket.take(1, 0.0)
    assert bucket.wait(1, 0.0) == 1.0
    bucket.lower(6_000, 6_000, 0.0)
    assert (bucket.per_minute, bucket.level) == (600, 0)


def test_what_the_server_has_left_lowers_the_bucket():
    bucket = TokenBucket(600, 0.0)
    bucket.lower(600, 0, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(0.1)


def test_other_limits_forget_no_call():
    limiter = RateLimiter(RateLimits(60), 0.0)
    limiter.reserve(CallSize(0), 0.0)
    limiter.change(RateLimits(120), 0.0)
    assert limiter.wait(CallSize(0), 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_at_least_one(wrong):
    with pytest.raises(ValueError, match="requests_per_minute must be at least 1"):
        RateLimits(wrong)
