"""Random edits of random plans: what runs again is what the oracle says, and what the preview said."""

from __future__ import annotations

import pytest

from plait.runner.operations.preview_reuse import Rehearsal
from plait.runner.state import kept_answers, reusable_answers
from tests.faults.campaigns.edits import violations


@pytest.mark.parametrize("first", range(0, 100, 25))
async def test_the_calls_are_those_of_the_oracle_and_of_the_preview(first: int) -> None:
    found = [one for seed in range(first, first + 25) for one in await violations(seed)]
    assert found == []


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Rehearsal, "_reads", lambda _self, _position: set[int]()),
        (kept_answers, "fork_cone", lambda _state, roots: set(roots)),
        (reusable_answers, "task_identity", lambda state, position: [state.dag.tasks[position].prompt]),
    ],
)
async def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, bug: object) -> None:
    monkeypatch.setattr(owner, name, bug)
    for seed in range(100):
        if await violations(seed):
            return
    pytest.fail(f"no seed shows the bug in {name}")
