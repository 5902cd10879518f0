"""The command with coding agents: plans that name them, and what a database may not say of them."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from plait.clock_and_ids import traceparent
from tests.support.agents.homes import Home, make_home
from tests.support.agents.logs import wait_for
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm
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


def test_no_conversation_is_offered_whose_end_the_store_did_not_take(home: Home) -> None:
    (home.path / "plan.yaml").write_text(PLAN[: PLAN.index("  - {id: one")])
    assert "  continue  plait continue " in plait_here(home.path, "run", "plan.yaml").err
    with closing(sqlite3.connect(home.path / ".plait" / "plait.db")) as database:
        database.execute("CREATE TRIGGER refusing BEFORE INSERT ON attempts BEGIN SELECT RAISE(ABORT, 'no'); END")
    done = plait_here(home.path, "run", "plan.yaml")
    assert done.code == 3
    assert "  resume    plait resume " in done.err and "plait continue" not in done.err


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


@pytest.fixture
def traced(home: Home) -> Home:
    """A home whose agent writes down the trace context of its process."""
    agent = home.path / "claude"
    agent.write_text(agent.read_text().replace("exec ", 'echo "$TRACEPARENT" >> "$HOME/traced"\nexec '))
    return home


def contexts(home: Home) -> list[str]:
    """The trace contexts since the last call, in order."""
    path = home.path / "traced"
    found = path.read_text().splitlines()
    path.unlink()
    return found


def test_an_agent_is_given_the_place_of_its_attempt_in_the_trace(traced: Home) -> None:
    folder = traced.path
    (folder / "plan.yaml").write_text(PLAN.partition("  - {id: one")[0])
    run_id = plait_here(folder, "run", "plan.yaml", "--json").value["run_id"]
    assert contexts(traced) == [traceparent(run_id, "facts", 1)]
    assert plait_here(folder, "continue", run_id, "facts", "And then?").code == 0
    assert contexts(traced) == [traceparent(run_id, "facts")]
    tried = plait_here(folder, "try", run_id, "facts", "--again", "--json")
    assert tried.code == 0, tried.err
    assert contexts(traced) == [traceparent(tried.value["run_id"], "facts", 1)]


@pytest.mark.parametrize("attempts", [1, 2])
def test_each_retry_is_an_attempt_of_its_own_in_the_trace(traced: Home, attempts: int) -> None:
    folder = traced.path
    retry = f"retry: {{attempts: {attempts}, base_delay: 0}}"
    plan = PLAN.partition("  - {id: facts")[0].replace("backend: coder", retry)
    (folder / "plan.yaml").write_text(plan + '  - {id: bad, backend: coder, prompt: "[[error 500]]"}\n')
    run_id = plait_here(folder, "run", "plan.yaml", "--json").value["run_id"]
    if attempts == 1:
        assert contexts(traced) == [traceparent(run_id, "bad", 1)]
        assert plait_here(folder, "resume", run_id, "--retry-failed", "-q").code == 1
        assert contexts(traced) == [traceparent(run_id, "bad", 2)]
    else:
        assert contexts(traced) == [traceparent(run_id, "bad", attempt) for attempt in (1, 2)]


def test_a_resumed_run_has_the_same_trace(traced: Home) -> None:
    folder = traced.path
    (folder / "plan.yaml").write_text(PLAN.partition("  - {id: facts")[0] + '  - {id: held, prompt: "[[until go]]"}\n')
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as process:
        wait_for(lambda: traced.begun > 0)
        process.kill()
    for pid in traced.processes:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not traced.processes)
    (folder / "go").touch()
    done = plait_here(folder, "resume", "--json")
    assert done.code == 0, done.err
    assert contexts(traced) == [traceparent(done.value["run_id"], "held", attempt) for attempt in (1, 2)]
