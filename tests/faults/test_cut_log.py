"""A run whose write-ahead log another program cuts, and what `plait resume` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes.command import plait

PLAN = """
name: cut
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: first, prompt: first}
  - {id: cuts, prompt: cuts, depends_on: first}
  - {id: last, prompt: last, depends_on: cuts}
"""
WORK = """
import subprocess
from pathlib import Path

async def work(prompt):
    if prompt == "cuts" and not Path("cut").exists():
        Path("cut").touch()
        size = Path(".plait/plait.db-wal").stat().st_size
        subprocess.run(["truncate", "-s", str(size - 10_000), ".plait/plait.db-wal"], check=True)
    return prompt.upper()
"""


def test_a_cut_log_degrades_the_run_and_a_resume_does_what_is_lost(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    run = plait(tmp_path, "run", "plan.yaml", "--json")
    told = json.loads(run.out)
    assert (run.code, told["status"], told["ran"]) == (3, "interrupted", 3)
    (away,) = told["degraded"]
    assert (away["until"], away["lost"] > 0) == (None, True)
    assert "another program has cut " in away["error"]
    assert "the store failed, continuing without a store: another program has cut" in run.err
    assert "cuts completed" not in run.err.partition("the store failed")[0]  # told before the next result
    assert "pages        whole" in plait(tmp_path, "doctor").out  # at an earlier state
    resumed = plait(tmp_path, "resume", "last", "--json")
    assert (resumed.code, json.loads(resumed.out)["degraded"]) == (0, [])
    shown = json.loads(plait(tmp_path, "show", "last", "--json").out)
    assert [task["text"] for task in shown["tasks"]] == ["FIRST", "CUTS", "LAST"]
