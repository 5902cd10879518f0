"""Limits that an agent met while nobody was there: the time to wait counts from when the agent wrote about them."""

from __future__ import annotations

import json
import os

import pytest

from plait.backends.process.child_manifest import ChildManifest, write_manifest
from tests.support.agents.homes import Home, fails

WRITTEN = 1_795_000_000.0  # Wednesday 18 November 2026, 11:06:40 UTC
HOUR = 3600.0


@pytest.mark.parametrize(
    ("words", "later", "wait"),
    [
        ("You've hit your 5-hour limit · resets 12:06pm (UTC)", 0.5 * HOUR, 0.5 * HOUR + 20),
        ("You've hit your 5-hour limit · resets 12:06pm (UTC)", 2 * HOUR, 0.0),  # and not tomorrow
        ("You've hit your usage limit. Try again in 3 hours.", 1 * HOUR, 2 * HOUR),
    ],
)
async def test_an_adopted_turn_waits_from_the_time_of_its_output(
    home: Home, words: str, later: float, wait: float
) -> None:
    folder = home.files().turn / "1"
    folder.mkdir(parents=True)
    write_manifest(folder, ChildManifest("0123456789abcdef", "another boot", 1, "1", {"kind": "claude-code"}))
    told = {"type": "result", "subtype": "success", "is_error": True, "result": words, "session_id": "s"}
    (folder / "stdout").write_text(json.dumps(told) + "\n")
    os.utime(folder / "stdout", (WRITTEN, WRITTEN))
    backend = home.claude(now=lambda: WRITTEN + later)
    error = await fails(backend, "Work.", session_id="s", files=home.files(), attaches=True)
    assert error.kind.value == "rate_limited"
    assert error.retry_after == pytest.approx(wait, abs=1)
