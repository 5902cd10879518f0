"""The runner is killed while real agents are at work; `python -m tests.real_agents.campaign` does it at length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.real_agents.campaign import campaign
from tests.support.sizes import size

CACHE = os.environ.get("PLAIT_CLIS", "")
TURNS = 6
ROUNDS = size(1, 3)


def _goes_well(kind: str) -> None:
    outcomes = campaign(Path(CACHE), kind, rounds=ROUNDS, turns=TURNS, seed=1)
    assert [one.answered for one in outcomes] == [TURNS] * ROUNDS, outcomes
    assert not any(one.sent_twice or one.out_of_order or one.left or one.usage_differs for one in outcomes), outcomes


@pytest.mark.clis("claude-code")
def test_claude_code() -> None:
    """kill -9 of plait and of some agents: every turn has its answer, no prompt is sent twice, no process is left."""
    _goes_well("claude-code")


@pytest.mark.clis("codex")
def test_codex() -> None:
    """kill -9 of plait and of some agents: every turn has its answer, no prompt is sent twice, no process is left."""
    _goes_well("codex")
