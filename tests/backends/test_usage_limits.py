"""A usage limit and its end, by a message that is written for people."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from plait.backends.error_kinds import announced_wait, names_quota, reports_limit, seconds_left
from plait.json_form import JsonValue

NOW = 1_795_000_000.0


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def wall(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


# NOW is Wednesday 18 November 2026, 11:06:40 UTC.
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("try again in 3 days 4 hours 5 minutes", 273_900.0),
        ("Please try again in 11.054s.", 11.054),
        ("Please try again in 250ms.", 0.25),
        ("retry in 1 minute and 5 seconds", 65.0),
        ("Your quota will reset after 10h15m3s.", 36_903.0),
        (
            "Rate limit of 50 per 86400s exceeded for UserByModelByDay. Please wait 42567 seconds before retrying.",
            42_567.0,
        ),
        ("Please wait 2 minutes.", 120.0),
        ("Please wait, then try again in 3 seconds", 3.0),
        ("Limit type: tokens. Remaining: 0. Limit resets at: 2026-11-18 11:10:00 UTC", 200.0),
        ("usage limit reached|1795000060", 60.0),
        ("usage limit reached|1794999999", 0.0),
        ("resets 3pm (Europe/Berlin)", 10_460.0),
        # The minute that the clock shows is not over, whatever its second; a moment ago is not tomorrow.
        ("resets 11:06am (UTC)", 20.0),
        ("resets 11:00am (UTC)", 0.0),
        ("resets 10:50am (UTC)", 85_460.0),
        ("resets 11:59pm (Asia/Kolkata)", 26_600.0),
        ("resets 12am (UTC)", 46_460.0),
        ("resets Nov 20, 3:30pm (UTC)", 188_660.0),
        ("resets Jan 2, 3pm (UTC)", 3_902_060.0),
        ("resets Dec 31, 3pm (UTC)", 3_729_260.0),
        ("resets Nov 16, 3pm (UTC)", 0.0),  # has passed, and does not mean next year's
        ("resets Nov 27 at 12:30am (UTC)", 739_460.0),
        ("resets November 27 at 12:30am (UTC)", 739_460.0),
        ("resets at 14:30 (UTC)", 12_260.0),
        ("resets 14:30 (UTC)", 12_260.0),
        ("try again at 9:05 (UTC)", 79_160.0),
        ("resets at 24:30 (UTC)", None),
        ("resets at 14", None),
        ("resets Tuesday 9am (UTC)", 510_860.0),
        ("resets Mon at 9am (UTC)", 424_460.0),
        ("resets on Thursday, 14:30 (UTC)", 98_660.0),
        ("resets Wed at 11am (UTC)", 0.0),  # this Wednesday, a moment ago
        ("resets Wed at 10am (UTC)", 600_860.0),
        ("resets Sat 12am (Asia/Kolkata)", 199_460.0),
        ("You will regain access on 2026-12-01 at 00:00 UTC.", 1_083_200.0),
        ("You will regain access on 2026-11-01 at 00:00 UTC.", 0.0),
        ("You will regain access on 2026-13-01 at 00:00 UTC.", None),
        ("You've reached your Fable 5 limit. Run /usage-credits to go on or switch models with /model", None),
        ("try again in a moment", None),
        ("try again at Foo 3rd, 2026 3:05 PM", None),
        ("try again at Feb 31st, 2026 3:05 PM", None),
        ("resets 3pm (Nowhere/Land) " + "x" * 5000, "local"),
        ("no word about it", None),
        ("", None),
    ],
)
def test_when_a_limit_ends(text: str, seconds: float | str | None) -> None:
    left = seconds_left(text, NOW)
    if seconds == "local":
        assert left is not None and 0 < left <= 86_400
    else:
        assert left == (None if seconds is None else pytest.approx(seconds, abs=0.001))


def test_times_without_a_zone_are_those_of_the_clock_on_the_wall(wall: str) -> None:
    then = time.localtime(NOW + 7200)
    clock = time.strftime("%I:%M %p", then).lstrip("0")
    assert os.environ["TZ"] == wall
    assert seconds_left(f"or try again at {clock}.", NOW) == pytest.approx(7200, abs=60)
    day = time.strftime("%b ", then) + f"{then.tm_mday}th, {then.tm_year} {clock}"
    assert seconds_left(f"or try again at {day}.", NOW) == pytest.approx(7200, abs=60)


LIMITS = [
    "You've hit your limit",
    "You've reached your Fable 5 limit. Run /usage-credits to go on",
    "You have reached your specified API usage limits.",
    "Weekly limit reached",
    "5-hour limit reached",
    "Opus limit reached ∙ resets tomorrow",
    "Monthly spend limit reached",
    # By the time at which the limit ends.
    "Opus limit reached, try again in 3 days",
    "You're out of extra usage · resets 3pm (UTC)",
    "Your quota will reset after 21h2m3s",
    "Monthly limits: regain access on 2026-12-31 at 00:00 UTC",
    "usage exceeded|1795000060",
]
NO_LIMITS = [
    "Context limit reached · /compact or /clear to continue",
    "Turn limit reached",
    "You've reached your maximum context limit",
    "You've hit your output token limit",
    "Opus limit reached",
    "the limit of the field is 10",
    "Server is temporarily limiting requests, try again in 5 minutes",
    "The connection was lost, try again in 3 days",
    "see the usage; resets later",
]


@pytest.mark.parametrize("message", LIMITS)
def test_a_used_up_limit(message: str) -> None:
    assert reports_limit(message)
    assert reports_limit(message.upper())
    assert not reports_limit(" " * 2000 + message)


@pytest.mark.parametrize("message", NO_LIMITS)
def test_no_used_up_limit(message: str) -> None:
    assert not reports_limit(message)


@pytest.mark.parametrize(
    ("message", "is_quota"),
    [
        ("You exceeded your current quota", True),
        ("Rate limit exceeded: free-models-per-day", True),
        ("Rate limit reached for m on tokens per day (TPD): Limit 100000", True),
        ("Rate limit reached for m on tokens per min (TPM): Limit 30000", False),
    ],
)
def test_a_quota_holds_for_all_calls_of_the_account(message: str, is_quota: bool) -> None:
    assert names_quota(message) is is_quota


def test_the_wait_in_the_body_of_an_error() -> None:
    gemini = {"error": {"message": "slow down", "details": [{"@type": "x"}, {"retryDelay": "34.5s"}]}}
    assert announced_wait(gemini, NOW) == 34.5
    assert announced_wait({"error": {"message": "quota, try again in 7s"}}, NOW) == 7.0
    assert announced_wait({"error": {"message": "no", "details": [{"retryDelay": "soon"}]}}, NOW) is None
    assert announced_wait(None, NOW) is None


@pytest.mark.parametrize(("reset", "seconds"), [("1795000060000", 60.0), ("1794999999000", 0.0), ("60", None)])
def test_the_end_of_the_limit_of_openrouter(reset: str, seconds: float | None) -> None:
    headers = {"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset}
    message = "Rate limit exceeded: free-models-per-day. Add 10 credits to unlock 1000 free model requests per day"
    error: JsonValue = {"message": message, "code": 429, "metadata": {"headers": dict[str, JsonValue](headers)}}
    assert announced_wait({"error": error}, NOW) == seconds


# The clock that reads the message, and the end that it names; both UTC. The reader's own zone is that of New York.
PROVIDERS = [
    # Claude
    ("You've hit your session limit · resets 3am (Asia/Tokyo)", "2026-11-27T17:00", "2026-11-27T18:01"),
    ("You've hit your weekly limit · resets Nov 30 at 9am (Europe/Berlin)", "2026-11-27T17:00", "2026-11-30T08:01"),
    ("You've hit your weekly limit · resets Mon at 9am (UTC)", "2026-11-27T17:00", "2026-11-30T09:01"),
    ("You've hit your weekly limit · resets Jan 2 at 9am (UTC)", "2026-12-30T17:00", "2027-01-02T09:01"),
    ("5-hour limit reached ∙ resets 10:30pm", "2026-11-28T03:25", "2026-11-28T03:31"),
    ("5-hour limit reached ∙ resets 10:30pm", "2026-11-28T05:05", "2026-11-29T03:31"),  # read after midnight there
    ("5-hour limit reached ∙ resets 10:30pm", "2026-11-28T03:35", "2026-11-28T03:31"),  # a moment ago: not tomorrow
    ("5-hour limit reached ∙ resets 12:30am", "2026-11-28T05:35", "2026-11-28T05:31"),
    ("5-hour limit reached ∙ resets 12am (UTC)", "2026-11-27T23:59", "2026-11-28T00:01"),
    ("5-hour limit reached ∙ resets 12pm (UTC)", "2026-11-28T00:35", "2026-11-28T12:01"),
    (
        "5-hour limit reached ∙ resets 3am (America/New_York)",
        "2026-11-01T04:30",
        "2026-11-01T08:01",
    ),  # summer time ends
    ("Opus limit reached ∙ resets tomorrow at 9am (UTC)", "2026-11-27T17:00", "2026-11-28T09:01"),
    ("Claude AI usage limit reached|1795000000", "2026-11-17T17:00", "2026-11-18T11:06:40"),
    ("You will regain access on 2026-12-01 at 00:00 UTC.", "2026-11-27T17:00", "2026-12-01T00:00"),
    # Codex
    ("You've hit your usage limit, or try again at Nov 29th, 2026 3:05 PM.", "2026-11-27T17:00", "2026-11-29T20:06"),
    ("You've hit your usage limit. Try again at 11:45 PM.", "2026-11-27T17:00", "2026-11-28T04:46"),
    ("Usage limit. Try again in 4 days 20 hours 9 minutes.", "2026-11-27T17:00", "2026-12-02T13:09"),
    ("Usage limit. Try again in 2 weeks.", "2026-11-27T17:00", "2026-12-11T17:00"),
    # Gemini
    ("Your quota will reset after 21h2m3s.", "2026-11-27T17:00", "2026-11-28T14:02:03"),
    ("Quota exceeded. Please retry in 38.5s.", "2026-11-27T17:00", "2026-11-27T17:00:38.5"),
    ("Your daily quota will reset at midnight America/Los_Angeles", "2026-11-27T17:00", "2026-11-28T08:01"),
    ("Daily limit; resets at 2026-11-28T00:00:00Z", "2026-11-27T17:00", "2026-11-28T00:00"),
    ("Daily limit; resets at 2026-11-28 01:00:00+01:00", "2026-11-27T17:00", "2026-11-28T00:00"),
    # OpenAI
    (
        "Rate limit reached for gpt-5 on RPM: Limit 3. Please try again in 20s.",
        "2026-11-27T17:00",
        "2026-11-27T17:00:20",
    ),
    ("Rate limit reached. Please try again in 1h9m7.5s.", "2026-11-27T17:00", "2026-11-27T18:09:07.5"),
    ("Limit resets on Monday, November 30 at 9:00 AM UTC", "2026-11-27T17:00", "2026-11-30T09:01"),
    ("Usage limit; try again at noon UTC", "2026-11-27T17:00", "2026-11-28T12:01"),
    # Groq
    ("Tokens per day (TPD): Limit 500000. Please try again in 7m12.5s.", "2026-11-27T17:00", "2026-11-27T17:07:12.5"),
    ("Please try again in 250ms.", "2026-11-27T17:00", "2026-11-27T17:00:00.25"),
]


@pytest.mark.parametrize(("text", "now", "end"), PROVIDERS)
def test_the_words_of_each_provider(text: str, now: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_at, ends_at = (datetime.fromisoformat(f"{one}+00:00").timestamp() for one in (now, end))
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        left = seconds_left(text, read_at)
    time.tzset()
    assert left == pytest.approx(max(0.0, ends_at - read_at), abs=0.001)
