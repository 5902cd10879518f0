"""The reason for a wait is the same in each output, read by another process, also after the owner was killed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.agents.logs import LIMIT, wait_for
from tests.support.processes.command import PLAIT, Terminal, environment, plait_here
from tests.support.processes.warm import Warm

FUNCTIONS = """
from pathlib import Path


import anyio
from plait.errors import BackendError, ErrorKind

async def hold(prompt):
    Path(f"at-{prompt}").touch()
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return prompt

async def quick(prompt):
    while not Path("paused").exists():
        await anyio.sleep(0.01)
    return prompt

async def refuse(prompt):
    error = BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=600.0)
    error.status = 429
    raise error

async def fail(prompt):
    raise BackendError(ErrorKind.TRANSIENT, "try later", retry_after=600.0)
"""
PLAN = """
name: waits
concurrency: 8
backends:
  hold: {kind: function, call: "functions.py:hold", concurrency: 1}
  api: {kind: function, call: "functions.py:refuse", concurrency: 2}
  weak: {kind: function, call: "functions.py:fail"}
  quick: {kind: function, call: "functions.py:quick"}
  person: {kind: person}
defaults: {backend: hold}
tasks:
  - {id: first, prompt: first}
  - {id: second, prompt: second}
  - {id: after, prompt: "{{ first }} {{ second }}", depends_on: [first, second]}
  - {id: call, prompt: call, backend: api}
  - {id: later, prompt: later, backend: api, depends_on: quick}
  - {id: weak, prompt: weak, backend: weak}
  - {id: asks, prompt: "how many?", backend: person}
  - {id: quick, prompt: quick, backend: quick}
"""


def waits(folder: Path) -> dict[str, str]:
    """The texts of `plait show --json`, without times."""
    value = plait_here(folder, "show", "last", "--json").value
    return {task["task_id"]: task["waits"]["text"] for task in value["tasks"] if task["waits"]}


def kinds(folder: Path) -> dict[str, str]:
    value = plait_here(folder, "show", "last", "--json").value
    return {task["task_id"]: task["waits"]["kind"] for task in value["tasks"] if task["waits"]}


def make(folder: Path) -> None:
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text(PLAN)


def test_another_process_gives_the_reason_of_each_task_alive_and_dead(tmp_path: Path) -> None:
    make(tmp_path)
    expected = {
        "second": "slot",
        "after": "upstream",
        "call": "retry",
        "later": "throttled",
        "weak": "retry",
        "asks": "question",
    }
    printed = tmp_path / "printed"
    with (
        printed.open("w") as output,
        Warm([*PLAIT, "run", "plan.yaml"], cwd=tmp_path, env=environment(), stderr=output) as process,
    ):
        try:
            wait_for((tmp_path / "at-first").exists)
            wait_for(lambda: kinds(tmp_path).get("call") == "retry")
            (tmp_path / "paused").touch()
            wait_for(lambda: kinds(tmp_path) == expected)
            alive = waits(tmp_path)
            rows = plait_here(tmp_path, "show", "last").out
            log = plait_here(tmp_path, "log", "last").out
        finally:
            process.kill()
            process.wait(LIMIT)
    assert alive["second"] == "no free slot of hold (1 of 1)"
    assert alive["after"] == "waits for first, second"
    assert alive["later"].startswith("api paused until ")
    assert alive["later"].endswith(" after 429, limit 1 of 2")
    (line,) = [line for line in printed.read_text().splitlines() if "after 429" in line]
    until = r"(?:[\d:]{8}|\w{3} \d\d \w{3} [\d:]{5})"  # with the day if midnight lies between
    assert re.fullmatch(rf"[\d:]{{8}} api paused \w+ after 429, until {until}; 1 of 2 slots", line), line
    for task, text in alive.items():
        if task != "asks":  # its row has the question
            assert text in rows, task
        assert text in log, task
    dead = waits(tmp_path)
    assert dead["after"] == "waits for first, second"
    assert {one: kind for one, kind in kinds(tmp_path).items() if kind != "owner_dead"} == {
        "after": "upstream",
        "asks": "question",
    }
    assert dead["first"].startswith(f"owner dead (process {process.pid} on ")
    assert f"waits     {dead['second']}\n" in plait_here(tmp_path, "show", "last", "second").out
    shown = plait_here(tmp_path, "show", "last").out
    assert f"\nreason    {dead['second']}\n" in shown
    assert shown.count("owner dead") == 1, "once, not in each row"


def test_the_live_display_names_the_same_reasons(tmp_path: Path) -> None:
    make(tmp_path)
    with Terminal(tmp_path, "run", "plan.yaml") as terminal:
        terminal.until("second  no free slot of hold (1 of 1)")
        terminal.until("after  waits for first, second")
        terminal.until("call tries again")
        (tmp_path / "paused").touch()
        terminal.until("later  api paused until ")
        terminal.press_ctrl_c()
        assert terminal.wait() == 6
