"""A run with loops and called plans that is killed with SIGKILL at any durable boundary goes on in the same round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sizes import size

_SCRIPT = """
import asyncio, json, os, random, shutil, signal, sys
from pathlib import Path
from plait import ParallelRunner, SQLiteStore, failpoints
from plait.events import TaskCompleted
from plait.runner.plan.plan_file import parse_plan

HERE = os.getcwd()

class NoDelay(random.Random):
    def random(self):
        return 0.0

def write(name, text):
    with open(name, "a") as file:
        file.write(json.dumps(text) + "\\n")

def read(name):
    return [json.loads(line) for line in open(name)] if os.path.exists(name) else []

async def say(prompt):
    write("calls", prompt)
    return {"ok": "x x" in prompt, "text": prompt.partition(" ")[2]} if prompt.startswith("test") else prompt + " x"

async def go():
    dag = parse_plan(Path(HERE, "plan.yaml").read_text(), folder=Path(HERE)).dag
    async with SQLiteStore("plait.db") as store:
        runner = ParallelRunner(say, store=store, concurrency=2, rng=NoDelay())
        new = await store.get_run("r") is None
        run = runner.start(dag, "r") if new else runner.start_resume("r")
        async with run:
            async for event in run.events():
                if isinstance(event, TaskCompleted):
                    write("acknowledged", [event.task_id, event.text])
        await run.result()

async def look():
    async with SQLiteStore("plait.db", mode="read") as store:
        return (await store.get_run("r")).status, {one.task_id: one.text for one in await store.list_tasks("r")}

def forked(kill_at=0, at=None):
    child = os.fork()
    if child == 0:
        left = [kill_at]
        def die(name):
            write("reached", name)
            left[0] -= at is None or at == name
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        failpoints.on_reach = die
        try:
            asyncio.run(go())
            os._exit(0)
        except BaseException as error:
            write("errors", repr(error))
            os._exit(1)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def trial(number, kills, at=None):
    folder = f"{HERE}/{number}"
    os.mkdir(folder)
    os.chdir(folder)
    made = sum(forked(kill_at, at) for kill_at in kills) + forked()
    status, stored = asyncio.run(look())
    found = {
        "kills": made,
        "status": status,
        "stored": stored,
        "lost": [one for one in read("acknowledged") if stored[one[0]] != one[1]],
        "calls": read("calls"),
        "reached": read("reached"),
        "errors": read("errors"),
    }
    os.chdir(HERE)
    shutil.rmtree(folder)
    return found

def main(at=None, share="0/1"):
    first, step = map(int, share.split("/"))
    whole = trial("whole", [])
    count = len(whole["reached"]) if at is None else whole["reached"].count(at)
    kills = [[n, 1 + n * 7 % 17] if at is None and n % 3 == 0 else [n] for n in range(1, count + 1)]
    chosen = kills[first::step]
    print(json.dumps([whole, *(trial(str(number), each, at) for number, each in enumerate(chosen))]))

main(sys.argv[1] or None, sys.argv[2])
"""
_PLAN = """
tasks:
  - id: fix
    loop:
      tasks:
        - {id: write, prompt: "write {{ last }}"}
        - {id: test, prompt: "test {{ write }}", depends_on: write, output_schema: {type: object}}
      with: {last: "{{ previous.test.text }}"}
      until: "{{ test.ok }}"
      max: 4
  - {id: call, plan: inner.yaml, with: {word: "{{ fix.test.text }}"}, depends_on: fix}
  - {id: end, prompt: "end {{ call }}", depends_on: call}
"""
_INNER = """
inputs: {word: ""}
tasks: [{id: a, prompt: "a {{ word }}"}, {id: b, prompt: "b {{ a }}", depends_on: a}]
returns: "{{ b }}"
"""


def found_in(folder: Path, at: str = "", share: str = "0/1") -> list[dict[str, Any]]:
    (folder / "script.py").write_text(_SCRIPT)
    (folder / "plan.yaml").write_text(_PLAN)
    (folder / "inner.yaml").write_text(_INNER)
    command = [sys.executable, "script.py", at, share]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, timeout=600, text=True)
    assert done.returncode == 0, done.stderr
    trials: list[dict[str, Any]] = json.loads(done.stdout)
    return trials


def check(trials: list[dict[str, Any]]) -> None:
    whole = trials[0]
    rounds = [f"fix.{number}.{name}" for number in (1, 2) for name in ("write", "test")]
    assert [*whole["stored"]] == ["fix", "call", "end", *rounds, "call.a", "call.b"]
    for trial in trials:
        assert (trial["status"], trial["errors"], trial["lost"]) == ("completed", [], [])
        assert trial["stored"] == whole["stored"], "a round was done again, or left out"
        assert {*trial["calls"]} == {*whole["calls"]}
        assert len(trial["calls"]) <= len(whole["calls"]) + trial["kills"]


@pytest.mark.slow
def test_a_kill_between_the_end_of_the_last_task_and_what_follows_repeats_no_round(tmp_path: Path) -> None:
    trials = found_in(tmp_path, "txn.after_commit")
    assert {trial["kills"] for trial in trials[1:]} == {1}
    check(trials)


@pytest.mark.slow
@pytest.mark.parametrize("share", size(["0/5"], ["0/4", "1/4", "2/4", "3/4"]))
def test_a_run_with_loops_killed_at_every_boundary_goes_on_in_the_same_round(tmp_path: Path, share: str) -> None:
    check(found_in(tmp_path, share=share))
