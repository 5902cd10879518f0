"""A person is asked what an agent may do: `plait run`, `plait answer`, `plait resume`, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real_agents.install import known
from tests.real_agents.world import World

ROOT = Path(__file__).parents[2]
WAITING, COMPLETED = 4, 0
CLAUDE: Mapping[str, Any] = {
    "kind": "claude-code",
    "model": "claude-sonnet-4-5",
    "ask_for": ["Bash", "AskUserQuestion"],
}
GOOSE: Mapping[str, Any] = {"kind": "acp", "mode": "approve", "permissions": "ask", "pass_env": ["STUB_KEY"]}
QUESTION = {
    "questions": [
        {
            "question": "Which of the two?",
            "header": "Pick",
            "multiSelect": False,
            "options": [{"label": "red", "description": "r"}, {"label": "blue", "description": "b"}],
        }
    ]
}


def plait(world: World, *words: str, code: int = COMPLETED) -> str:
    """What the command says; with --json, to be read."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "plait", *words],
        cwd=world.folder,
        env=world.environment | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


def begin(world: World, agent: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Run a plan with that task until somebody has to be asked; the question."""
    cli = "goose" if agent["kind"] == "acp" else "claude-code"
    path = str(known()[cli].path(world.cache))
    command: Any = [path, "acp"] if cli == "goose" else path
    plan = {
        "backends": {"agent": {**agent, "command": command}},
        "tasks": [{"id": "a", "prompt": prompt}, {"id": "b", "prompt": "B [[say ok]]", "continues": "a"}],
    }
    (world.folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    plait(world, "run", "plan.yaml", "--json", code=WAITING)
    assert world.children == []
    return question(world)


def question(world: World) -> dict[str, Any]:
    (asked,) = json.loads(plait(world, "answer", "last", "--json"))
    return asked


def refused(world: World, value: str) -> str:
    """What is said to an answer that does not fit."""
    words = (sys.executable, "-m", "plait", "answer", "last", "a", value)
    environment = world.environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=world.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout
    return done.stderr


def answer(world: World, value: str, code: int = COMPLETED) -> dict[str, Any]:
    """The answer is given, and another process goes on with the run; its tasks as they stand then."""
    plait(world, "answer", "last", "a", value)
    plait(world, "resume", "--json", code=code)
    assert world.children == []
    shown = json.loads(plait(world, "show", "last", "--json"))
    return {task["task_id"]: task for task in shown["tasks"]}


@pytest.mark.clis("claude-code")
def test_a_use_is_allowed(world: World):
    """What a person has allowed is done, once, in the same session, and each further use is asked about anew."""
    made, more = world.root / "made", world.root / "more"
    asked = begin(world, CLAUDE, f"Q1 [[tool echo x >> {made}]] [[tool echo y >> {more}]] [[say the end]]")
    assert str(made) in asked["question"]
    assert not made.exists()
    tasks = answer(world, "allow", code=WAITING)
    assert made.read_text() == "x\n"
    assert not more.exists()
    assert tasks["a"]["status"] == "waiting_input"
    assert str(more) in question(world)["question"]
    tasks = answer(world, "allow")
    assert (made.read_text(), more.read_text()) == ("x\n", "y\n")
    assert (tasks["a"]["text"], tasks["b"]["text"]) == ("the end", "ok")
    prompts = world.asked("Q1")[-1].prompts
    assert [prompt.partition(" ")[0] for prompt in prompts] == ["Q1", "B"]


@pytest.mark.clis("claude-code")
def test_a_use_is_denied(world: World):
    """A no with its reason reaches the model, nothing is done, and the turn goes on."""
    made = world.root / "made"
    begin(world, CLAUDE, f"Q2 [[tool echo x >> {made}]] [[say the end]]")
    tasks = answer(world, "deny: use make instead")
    assert not made.exists()
    assert tasks["a"]["text"] == "the end"
    told = "\n".join(text for _, text in world.asked("Q2")[-1].said)
    assert "use make instead" in told


@pytest.mark.clis("claude-code")
def test_the_agent_asks(world: World):
    """A question of the agent's own becomes the task's, and the model hears what a person has answered."""
    asked = begin(world, CLAUDE, f"Q3 [[tool-named AskUserQuestion {json.dumps(QUESTION)}]] [[say the end]]")
    assert asked["question"] == "Which of the two? (red, blue)"
    tasks = answer(world, "blue")
    assert tasks["a"]["text"] == "the end"
    said = [text for role, text in world.asked("Q3")[-1].said if role == "tool"]
    assert any("blue" in text for text in said), said


@pytest.mark.clis("claude-code")
def test_a_budget_is_raised(world: World):
    """With its budget spent the turn ends; with a raised one the model goes on in the same session."""
    made = world.root / "made"
    prompt = f"Q5 [[tool echo x >> {made}]]"
    asked = begin(world, {**CLAUDE, "ask_for": [], "allowed_tools": ["Bash"], "max_budget_usd": 0.0001}, prompt)
    assert asked["question"].startswith("Claude Code reached its budget of $0.0001 (spent $0.0001")
    assert not made.exists()
    assert "does not fit the question" in refused(world, "0.0001")
    tasks = answer(world, "2.5", code=WAITING)  # task b has a budget of its own, and spends it, too
    assert (tasks["a"]["status"], tasks["b"]["status"]) == ("completed", "waiting_input")
    said = next(one.prompts for one in world.asked("Q5") if len(one.prompts) == 2)
    assert said[0] == prompt
    assert said[1].startswith("You were stopped because the budget")
    shown = json.loads(plait(world, "show", "last", "a", "--json"))
    costs = [one["cost_usd"] for one in shown["history"]]
    assert len(costs) == 2
    assert all(cost > 0 for cost in costs)


@pytest.mark.clis("goose")
def test_an_agent_by_acp_asks(world: World):
    """A request for permission is a person's to answer; the agent hears of it in the same session, and may once."""
    made = world.root / "made"
    asked = begin(world, GOOSE, f"Q4 [[tool echo x >> {made}]] [[say the end]]")
    assert not made.exists()
    assert str(made) in asked["question"]
    assert "allow_once" in asked["schema"]["enum"]
    tasks = answer(world, "allow_once")
    assert [tasks[name]["status"] for name in ("a", "b")] == ["completed", "completed"]
    assert made.read_text() == "x\n"
    told = ["\n".join(one.prompts).count("The answer is: allow_once") for one in world.asked("Q4")]
    assert set(told[1:]) == {1}, told
