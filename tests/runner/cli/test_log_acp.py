"""`plait log` of agents that speak ACP: what they said and used, what they asked for, and what they were answered."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from plait.backends import Output
from plait.backends.agents.agent_output import TurnWatch
from tests.runner.cli.test_terminal_output import CORPUS, MARKUP, assert_harmless
from tests.support.agents.homes import Home
from tests.support.agents.logs import make_log_home, outputs, plan, untimed
from tests.support.processes.command import Terminal, plait_here

PROMPT = "Mend it. [[tool]] [[ask make clean]] [[say I found it.]]"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return make_log_home(tmp_path, monkeypatch)


def acp_plan(home: Home, prompt: str, permissions: str = "allow", more: str = "") -> Path:
    folder = plan(home, f"  - {{id: fix, prompt: {json.dumps(prompt)}}}\n{more}")
    text = (folder / "plan.yaml").read_text()
    coder = f"coder: {{kind: acp, command: [./acp], permissions: {permissions}}}"
    (folder / "plan.yaml").write_text(re.sub(r"coder: \{.*\}", coder, text))
    return folder


def told_of(folder: Path, task: str = "fix") -> list[str]:
    done = plait_here(folder, "log", "last", task)
    assert (done.code, done.err) == (0, "")
    return untimed(done.out)


@pytest.mark.parametrize(
    ("permissions", "answered"),
    [("allow", "allowed: make clean (Allow)"), ("deny", "not allowed: make clean (Reject)")],
)
def test_a_turn_reads_as_a_story(home: Home, permissions: str, answered: str) -> None:
    folder = acp_plan(home, PROMPT, permissions)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    told = told_of(folder)
    assert told[0] == "started (coder)"
    assert told[2:6] == [
        "> make test",
        "| I have to ask.",
        "> make clean",
        "waits: the agent asks for permission: make clean (Always allow, Allow, Reject)",
    ]
    assert told[6] == f"notice: {answered}"
    assert told[-2] == "| I found it."
    assert re.fullmatch(r"completed [\d.]+s 15\+7 tokens \$0\.0010", told[-1])


def test_what_a_person_is_asked_and_what_came_of_it(home: Home) -> None:
    folder = acp_plan(home, PROMPT, "ask")
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 4
    told = told_of(folder)
    asks = told.index("waits: the agent asks for permission: make clean (Always allow, Allow, Reject)")
    assert told[asks + 1] == "notice: not allowed as yet: make clean"
    assert re.fullmatch(r"fix +asks a person", told[-1])
    assert plait_here(folder, "answer", "last", "fix", "Allow").code == 0
    assert plait_here(folder, "resume", "last", "-q").code == 0
    told = told_of(folder)
    assert any(line.startswith("answered by person: ") for line in told) and told[-1].startswith("completed")


def test_what_was_said_before_is_not_told_again(home: Home) -> None:
    folder = acp_plan(home, "One. [[say The first.]]", more='  - {id: on, prompt: "Two.", continues: fix}\n')
    (folder / "acp").write_text((folder / "acp").read_text().replace('"$@"', '--lacks=resume,fork "$@"'))
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    assert "session/load" in (folder / "heard.jsonl").read_text()
    assert [line for line in told_of(folder, "on") if line.startswith("|")] == ["| answer 3 to: Two."]


def test_nothing_that_an_agent_says_acts_on_the_terminal(home: Home) -> None:
    folder = acp_plan(home, PROMPT)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    evil = CORPUS + MARKUP
    [output] = outputs(folder)
    asked = {"toolCall": {"toolCallId": "e", "title": evil}, "options": [{"optionId": "e", "name": evil}]}
    session = home.calls[0]["session"]
    updates = [
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": f"fine\n10:00:00  fix  {evil}"}},
        {"sessionUpdate": "tool_call", "toolCallId": "f", "title": evil},
    ]
    with output.open("a") as file:
        for update in updates:
            params = {"sessionId": session, "update": update}
            file.write(json.dumps({"jsonrpc": "2.0", "method": "session/update", "params": params}) + "\n")
        file.write(json.dumps({"id": "e", "method": "session/request_permission", "params": asked}) + "\n")
    with Terminal(folder, "log", "last") as terminal:
        assert terminal.wait() == 0
    assert_harmless(terminal.seen)
    assert_harmless(plait_here(folder, "log", "last", "fix", "--json").out.encode())
    told = told_of(folder)
    assert any(line.startswith("> ") and "\\x1b]0;OWNED" in line for line in told)
    assert any(line.startswith("waits: the agent asks for permission: ") and "OWNED" in line for line in told)
    assert "| 10:00:00  fix  " in "\n".join(told)


def test_an_answer_that_is_not_there_yet_is_told_with_what_follows(home: Home) -> None:
    """Who follows a turn may read what the agent asks before it is answered."""
    folder = acp_plan(home, PROMPT)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    [output] = outputs(folder)
    said = output.with_name("messages")
    lines, answers = (path.read_bytes().splitlines(keepends=True) for path in (output, said))
    asks = next(n for n, line in enumerate(lines) if b"session/request_permission" in line)
    answered = next(n for n, line in enumerate(answers) if b"optionId" in line)
    output.write_bytes(b"".join(lines[: asks + 1]))
    said.write_bytes(b"".join(answers[:answered]) + answers[answered][:9])
    with closing(TurnWatch(output.parents[1])) as watch:
        assert [one.kind for one in shown(watch)] == ["tool", "text", "tool", "waiting"]
        said.write_bytes(b"".join(answers))
        with output.open("ab") as file:
            file.writelines(lines[asks + 1 :])
        notice, *rest = shown(watch)
    assert (notice.kind, notice.text) == ("notice", "allowed: make clean (Allow)")
    assert "".join(one.text for one in rest if one.kind == "text") == "I found it."


def shown(watch: TurnWatch) -> list[Output]:
    """All that there is by now."""
    found: list[Output] = []
    while watch.peek() is not None:
        found.append(watch.take().output)
    return found
