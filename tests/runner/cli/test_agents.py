"""The command with coding agents: plans that name them, and what a database may not say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.runner.domain.trace_ids import traceparent
from tests.support.agents.homes import Home, make_home
from tests.support.processes.command import plait, plait_here
from tests.support.stores.database import edit_runs

PLAN = """
backends:
  coder: {kind: claude-code, command: ./claude, allowed_tools: [Read], concurrency: 2}
defaults: {backend: coder}
tasks:
  - {id: facts, prompt: "Look around. [[tool]]"}
  - {id: one, prompt: "First way.", continues: facts}
  - {id: two, prompt: "Second way.", continues: facts}
  - id: mood
    prompt: "{{ one }} {{ two }}"
    depends_on: [one, two]
    output_schema: {type: object, properties: {mood: {type: string}}, required: [mood]}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = make_home(tmp_path, monkeypatch)
    (home.path / "plan.yaml").write_text(PLAN)
    return home


def test_a_plan_of_agents_runs_and_each_conversation_goes_on(home: Home) -> None:
    done = plait(home.path, "run", "plan.yaml", "--json")
    assert done.code == 0, done.err
    tasks = {task["task_id"]: task for task in done.value["tasks"]}
    sessions = {tasks[name]["session_id"] for name in tasks}
    assert len(sessions) == 4
    users = {
        call["session"]: [text for role, text in call["said"] if role == "user" and "<result" not in text]
        for call in home.calls
    }
    assert users[tasks["one"]["session_id"]] == ["Look around. [[tool]]", "First way."]
    assert users[tasks["two"]["session_id"]] == ["Look around. [[tool]]", "Second way."]
    assert tasks["mood"]["data"] == {"mood": "good"}
    said = plait_here(home.path, "continue", done.value["run_id"], "one", "And then? [[say Then this.]]")
    assert said.code == 0, said.err
    assert "Then this." in said.out
    assert home.calls[-1]["session"] == tasks["one"]["session_id"]


def test_what_an_agent_may_do_is_for_the_plan_file_to_say(home: Home) -> None:
    done = plait_here(home.path, "run", "plan.yaml", "--json")
    run_id = done.value["run_id"]
    edit_runs(home.path / ".plait" / "plait.db", "settings = replace(settings, '\"Read\"', '\"Bash\"')")
    calls = len(home.calls)
    refused = plait_here(home.path, "continue", run_id, "one", "Go on.")
    assert refused.code == 2
    assert "coder" in refused.err
    assert "plan file" in refused.err
    assert len(home.calls) == calls


def test_mistakes_in_an_agents_options_are_told_with_their_place(home: Home) -> None:
    (home.path / "plan.yaml").write_text(PLAN.replace("allowed_tools", "alowed_tools"))
    done = plait_here(home.path, "check", "plan.yaml")
    assert done.code == 2
    assert "alowed_tools" in done.err
    assert "allowed_tools" in done.err


def test_an_agent_that_is_not_there_is_told_with_the_way_to_get_it(home: Home) -> None:
    (home.path / "plan.yaml").write_text(PLAN.replace("./claude", "no-such-claude"))
    done = plait_here(home.path, "run", "plan.yaml")
    assert done.code == 2
    assert "npm install" in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_an_agent_is_given_the_place_of_its_attempt_in_the_trace(home: Home) -> None:
    agent = home.path / "claude"
    agent.write_text(agent.read_text().replace("exec ", 'echo "$TRACEPARENT" >> "$HOME/traced"\nexec '))
    (home.path / "plan.yaml").write_text(PLAN.partition("  - {id: one")[0])
    run_id = plait_here(home.path, "run", "plan.yaml", "--json").value["run_id"]
    assert set((home.path / "traced").read_text().split()) == {traceparent(run_id, "facts", 1)}
