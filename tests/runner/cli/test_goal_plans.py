"""A goal and a step workflow as plan files: checked, run, killed, resumed, and compared with the edited file."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.runner.cli.test_cancel_command import until
from tests.runner.cli.test_run_goal import Cast, plait
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.processes.warm import Warm
from tests.support.team import ANSWER, CALLS
from tests.support.wire import serve

pytestmark = pytest.mark.slow

GOAL = """
inputs: {what: a and b}
backends:
  team: {kind: openai, model: m}
  expert: {kind: openai, model: expert}
defaults: {backend: team}
concurrency: 1
orchestrate:
  goal: Know {{ what }}
  reflect_every: 2
  planner: expert
  registry: {expert: "knows everything"}
"""
STEPS = """
backends: {f: {kind: function, call: "steps.py:step"}}
inputs: {who: Ada}
workflow:
  - {name: first, prompt: "flaky {{ who }}", on_error: retry, max_tries: 2, retry: {attempts: 1}}
  - {name: second, prompt: "held {{ first }}"}
  - {name: third, prompt: "{{ first }}, {{ second }}"}
"""
FUNCTION = """
import anyio
from pathlib import Path

async def step(prompt):
    with open("asked", "a") as file:
        file.write(prompt + "\\n")
    if prompt.startswith("flaky") and not Path("once").exists():
        Path("once").touch()
        raise ValueError("not today")
    while prompt.startswith("held") and not Path("go").exists():
        Path("holding").touch()
        await anyio.sleep(0.01)
    return f"<{prompt}>"
"""
LAST = "<<flaky Ada>, <held <flaky Ada>>>\n"


def write_steps(folder: Path, text: str = STEPS) -> None:
    (folder / "steps.yaml").write_text(text)
    (folder / "steps.py").write_text(FUNCTION)


async def test_a_goal_in_a_file_is_checked_and_reached(tmp_path: Path) -> None:
    (tmp_path / "goal.yaml").write_text(GOAL)
    checked = plait_here(tmp_path, "check", "goal.yaml")
    assert (checked.code, checked.out) == (
        0,
        "goal: a goal, at most 10 iterations, no mistakes\n"
        "  goal          Know a and b\n"
        "  backend       expert: openai, 1 task\n"
        "  backend       team: openai\n",
    )
    cast = Cast()
    async with serve(cast) as server:
        done = await plait(tmp_path, server, "run", "goal.yaml")
        assert (done.code, done.out) == (0, f"{ANSWER}\n"), done.err
        assert cast.calls == CALLS
        assert cast.models == {"plan": {"expert"}, "answer": {"expert"}, "find": {"m"}, "reflect": {"m"}}
        shown = await plait(tmp_path, server, "show", "last", "--json")
        assert (shown.value["name"], len(shown.value["tasks"])) == ("goal", 8)
        assert "- expert: knows everything" in shown.value["settings"]["inputs"]["registry"]


def test_the_answer_alone_is_printed_also_if_a_task_ends_beside_it(tmp_path: Path) -> None:
    (tmp_path / "goal.yaml").write_text(
        'backends: {f: {kind: function, call: "team.py:team"}}\norchestrate: {goal: g, reflect_every: 1}'
    )
    (tmp_path / "team.py").write_text("""
import anyio
answering, late = anyio.Event(), anyio.Event()

async def team(prompt):
    if prompt.startswith("You plan"):
        return {"tasks": [{"id": "a", "prompt": "early"}, {"id": "b", "prompt": "late"}]}
    if prompt.startswith("You do"):
        if "late" in prompt:
            await answering.wait()
            late.set()
        return "worked"
    if prompt.startswith("You judge"):
        return {"done": True}
    answering.set()
    await late.wait()
    for _ in range(50):  # turns of the loop, until the end of the late task is known
        await anyio.lowlevel.checkpoint()
    return "the answer"
""")
    done = plait_here(tmp_path, "run", "goal.yaml", "--no-store")
    assert (done.code, done.out) == (0, "the answer\n")
    assert "do.b completed" in done.err


@pytest.mark.parametrize("call", ["plan", "find b", "reflect"])
async def test_a_killed_run_of_a_goal_is_resumed_from_the_store(tmp_path: Path, call: str) -> None:
    (tmp_path / "goal.yaml").write_text(GOAL)
    cast = Cast()
    cast.hangs.add(call)
    async with serve(cast) as server:
        variables = environment(OPENAI_BASE_URL=f"{server.url}/v1", OPENAI_API_KEY="test")
        with Warm([*PLAIT, "run", "goal.yaml", "--set", "what=a"], cwd=tmp_path, env=variables) as process:
            with anyio.fail_after(60):
                await cast.hanging.wait()
            process.kill()
        cast.hangs.clear()
        cast.calls.clear()
        previewed = await plait(tmp_path, server, "resume", "last", "--dry-run")
        assert (previewed.code, "the plan file" in previewed.err) == (0, False), previewed.err
        edits = {"reflect_every: 2": "reflect_every: 3", "knows everything": "knows much", "Know {{": "Learn {{"}
        for old, new in edits.items():
            (tmp_path / "goal.yaml").write_text(GOAL.replace(old, new))
            noted = await plait(tmp_path, server, "resume", "last", "--dry-run")
            assert "has changed since this run was stored; a resume runs the stored plan" in noted.err
        (tmp_path / "goal.yaml").write_text(STEPS)
        noted = await plait(tmp_path, server, "resume", "last", "--dry-run")
        assert "was stored; a resume runs the stored plan" in noted.err
        done = await plait(tmp_path, server, "resume", "last")
    assert (done.code, done.out) == (0, f"{ANSWER}\n"), done.err
    assert sorted(cast.calls) == sorted(CALLS[CALLS.index(call) :])  # others go ahead of the call that was cut


def test_steps_in_a_file_are_checked_and_run(tmp_path: Path) -> None:
    write_steps(tmp_path)
    (tmp_path / "go").touch()
    checked = plait_here(tmp_path, "check", "steps.yaml")
    assert (checked.code, checked.out) == (
        0,
        "steps: 3 steps, no mistakes\n  longest path  first -> second -> third\n  backend       f: function, 1 task\n",
    )
    done = plait_here(tmp_path, "run", "steps.yaml", "-q")
    assert (done.code, done.out) == (0, LAST), done.err


def test_a_killed_run_of_steps_is_resumed_from_the_store(tmp_path: Path) -> None:
    write_steps(tmp_path)
    with Warm([*PLAIT, "run", "steps.yaml"], cwd=tmp_path, env=environment()) as process:
        until((tmp_path / "holding").exists)
        process.kill()
    (tmp_path / "go").touch()
    same = plait_here(tmp_path, "resume", "last", "--dry-run")
    assert (same.code, "the plan file" in same.err) == (0, False), same.err
    write_steps(tmp_path, STEPS.replace("max_tries: 2", "max_tries: 3"))
    noted = plait_here(tmp_path, "resume", "last", "--dry-run")
    assert "was stored; a resume runs the stored plan" in noted.err
    done = plait_here(tmp_path, "resume", "last", "-q")
    assert (done.code, done.out) == (0, LAST), done.err
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [asked.count(prompt) for prompt in ("flaky Ada", "held <flaky Ada>")] == [2, 2]
