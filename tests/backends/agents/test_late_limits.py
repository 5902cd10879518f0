"""A limit that an agent met while nobody was there: its words may be old, so the next attempt asks at once."""

from __future__ import annotations

import json

from plait.backends.process.child_manifest import ChildManifest, write_manifest
from tests.support.agents.homes import Home, fails


async def test_the_limit_of_an_adopted_turn_is_asked_about_again(home: Home) -> None:
    folder = home.files().turn / "1"
    folder.mkdir(parents=True)
    write_manifest(folder, ChildManifest("0123456789abcdef", "another boot", 1, "1", {"kind": "claude-code"}))
    words = "You've hit your 5-hour limit · resets 12:06pm (UTC)"
    told = {"type": "result", "subtype": "success", "is_error": True, "result": words, "session_id": "s"}
    (folder / "stdout").write_text(json.dumps(told) + "\n")
    error = await fails(home.claude(), "Work.", session_id="s", files=home.files(), attaches=True)
    assert (error.kind.value, error.retry_after) == ("rate_limited", 0.0)
