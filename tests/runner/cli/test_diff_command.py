"""`plait diff`: what differs between two runs, task by task, and where the runs diverged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.command import plait_here

FUNCTIONS = """
from contextlib import asynccontextmanager
from plait.backends import Reply, Usage
from plait.errors import BackendError, ErrorKind

class Talk:
    session_id = None
    async def send(self, prompt):
        if "fail" in prompt:
            raise BackendError(ErrorKind.REFUSED, "no")
        text = "rivers run to the sea" if "rivers" in prompt else prompt.upper()
        return Reply(text, usage=Usage(len(prompt), 2, 0.5))

class Backend:
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        yield Talk()

work = Backend()
"""
PLAN = """
name: edited
inputs:
  names: {names}
backends:
  work: {{kind: function, call: "functions.py:work"}}
tasks:
  - {{id: facts, prompt: "{facts}"}}
  - {{id: poem, prompt: "a poem of {{{{ facts }}}}", depends_on: facts}}
  - {{id: part, prompt: "do {{{{ item }}}}", for_each: names}}
  - {{id: apart, prompt: apart}}
{more}
"""


def run(folder: Path, code: int = 0, *, facts: str, names: str = "[ann, bob]", more: str = "") -> str:
    """Run the plan with these changes and return the id of the run."""
    (folder / "plan.yaml").write_text(PLAN.format(facts=facts, names=names, more=more))
    done = plait_here(folder, "run", "plan.yaml", "--json")
    assert done.code == code, done.err
    return str(done.value["run_id"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def test_a_changed_prompt_parts_the_runs_and_words_are_marked(folder: Path) -> None:
    one = run(folder, facts="three facts about the moon")
    other = run(folder, facts="four facts about the moon")
    out = plait_here(folder, "diff", one, other).out.splitlines()
    assert out[0].startswith(f"run       {one}, completed, ")
    assert out[2] == "diverged  at facts: prompt changed: line 1"
    assert "prompt    [-three-]{+four+} facts about the moon" in out
    assert "result    [-THREE-]{+FOUR+} FACTS ABOUT THE MOON" in out
    assert "-- poem: upstream facts changed --" in out
    assert "prompt    a poem of [-THREE-] {+FOUR+} FACTS ABOUT THE MOON" in [line.replace("]{", "] {") for line in out]
    assert out[-1] == "2 tasks changed, 3 the same"
    status = next(line for line in out if line.startswith("status"))
    assert "completed, 26+2 tokens, $0.5000" in status
    assert "-> completed, 25+2 tokens, $0.5000" in status


def test_the_same_answer_changes_nothing_behind(folder: Path) -> None:
    one, other = run(folder, facts="rivers"), run(folder, facts="many rivers")
    value = plait_here(folder, "diff", one, other, "--json").value
    assert (value["diverged"], value["same"], [task["task_id"] for task in value["tasks"]]) == ("facts", 4, ["facts"])
    assert (
        "diverged  at facts: prompt changed: line 1; same answer: cut off here"
        in plait_here(folder, "diff", one, other).out
    )
    (facts,) = value["tasks"]
    assert (facts["changed"], facts["why"]) == (["prompt"], "prompt changed: line 1")
    assert facts["words"] == {"prompt": [{"change": "added", "text": "many"}, {"change": "kept", "text": " rivers"}]}
    assert (facts["a"]["input_tokens"], facts["b"]["input_tokens"], facts["b"]["cost_usd"]) == (6, 11, 0.5)


def test_parts_are_compared_by_their_element(folder: Path) -> None:
    one, other = run(folder, facts="x"), run(folder, facts="x", names="[eve, ann, bob]")
    value = plait_here(folder, "diff", one, other, "--json").value
    assert [(task["task_id"], task["why"]) for task in value["tasks"]] == [("part.1", "new task")]


def test_added_removed_and_failed_tasks_are_differences(folder: Path) -> None:
    one = run(folder, facts="x", more="  - {id: old, prompt: old}\n  - {id: shaky, prompt: ok}")
    other = run(folder, 1, facts="x", more="  - {id: new, prompt: new}\n  - {id: shaky, prompt: fail}")
    value = plait_here(folder, "diff", one, other, "--json").value
    assert [(task["task_id"], task["why"], task["changed"]) for task in value["tasks"]] == [
        ("new", "new task", ["task"]),
        ("shaky", "prompt changed: line 1", ["prompt", "result", "status"]),
        ("old", "task removed", ["task"]),
    ]
    assert (value["a"]["status"], value["b"]["status"]) == ("completed", "failed")
    out = plait_here(folder, "diff", one, other).out
    assert "-> failed, " in out
    assert "refused: no" in out


def test_equal_runs_have_no_differences(folder: Path) -> None:
    one, other = run(folder, facts="x"), run(folder, facts="x")
    out = plait_here(folder, "diff", one, other).out.splitlines()
    assert out[2:] == ["0 tasks changed, 5 the same"]


def test_an_unknown_run_is_one_line(folder: Path) -> None:
    one = run(folder, facts="x")
    done = plait_here(folder, "diff", one, "gone")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_loops_are_compared(folder: Path) -> None:
    more = """
  - id: again
    depends_on: facts
    loop:
      tasks: [{id: write, prompt: "w {{ p }}"}]
      with: {p: "{{ previous.write }} {{ facts }}"}
      until: "{{ write }} != ''"
"""
    one, other = run(folder, facts="x", more=more), run(folder, facts="y", more=more)
    value = plait_here(folder, "diff", one, other, "--json").value
    assert {task["task_id"]: task["why"] for task in value["tasks"]} == {
        "facts": "prompt changed: line 1",
        "poem": "upstream facts changed",
        "again.1.write": "upstream p changed",
        "again": "upstream facts changed",
    }
