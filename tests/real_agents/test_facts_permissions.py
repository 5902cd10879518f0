"""What plait relies on to turn what Claude Code may not do by itself into a question to a person."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real_agents.calls import claude, claude_argv, new_id, result
from tests.real_agents.world import Json, Turn, World

pytestmark = pytest.mark.clis("claude-code")
QUESTIONS = {
    "questions": [
        {
            "question": "Which?",
            "header": "Pick",
            "multiSelect": False,
            "options": [{"label": "A", "description": "a"}, {"label": "B", "description": "b"}],
        }
    ]
}


def hook(world: World, tool: str, decision: str, **more: Any) -> tuple[str, str]:
    """Options for a PreToolUse hook that answers so for that tool, and keeps what it was asked."""
    said = {"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": decision, **more}}
    (world.root / "decision").write_text(json.dumps(said))
    command = f"cat > {world.root}/asked; cat {world.root}/decision"
    hooks = {"PreToolUse": [{"matcher": tool, "hooks": [{"type": "command", "command": command}]}]}
    return "--settings", json.dumps({"hooks": hooks})


def asked_hook(world: World) -> Json:
    return json.loads((world.root / "asked").read_text())


def deferred(world: World, session: str, ran: Path) -> Turn:
    prompt = f"PD [[tool echo x > {ran}]] [[say the end]]"
    return claude(world, prompt, "--session-id", session, *hook(world, "Bash", "defer"))


def test_defer(world: World):
    """A PreToolUse hook that says defer ends the turn, a success whose result has deferred_tool_use; nothing ran."""
    session, ran = new_id(), world.root / "ran"
    turn = deferred(world, session, ran)
    last = result(turn)
    assert (last["subtype"], last["is_error"], last["result"], turn.status) == ("success", False, "", 0)
    assert (last["stop_reason"], last["terminal_reason"]) == ("tool_deferred", "tool_deferred")
    waiting = last["deferred_tool_use"]
    assert (waiting["name"], waiting["input"]["command"]) == ("Bash", f"echo x > {ran}")
    told = asked_hook(world)
    assert (told["tool_use_id"], told["tool_name"], told["session_id"]) == (waiting["id"], "Bash", session)
    assert not ran.exists() and len(world.asked("PD")) == 1


def test_deferred_then_allowed(world: World):
    """Resumed without a prompt, the hook is asked about the same call; allow runs it, and the turn goes on."""
    session, ran = new_id(), world.root / "ran"
    waiting = result(deferred(world, session, ran))["deferred_tool_use"]["id"]
    turn = claude(world, "", "--resume", session, *hook(world, "Bash", "allow"))
    assert asked_hook(world)["tool_use_id"] == waiting
    assert ran.exists() and result(turn)["result"] == "the end"
    said = world.asked("PD")[-1].said
    assert [role for role, _ in said] == ["user", "assistant", "tool", "user"]
    assert said[-1][1] == "Continue from where you left off."
    kinds = [one["type"] for one in turn.events]
    assert kinds.index("user") < kinds.index("system") < kinds.index("result") < len(kinds) - 1


def test_deferred_then_denied(world: World):
    """Deny with a reason: the model is told the reason as the tool's error and goes on; permission_denials lists it."""
    session, ran = new_id(), world.root / "ran"
    deferred(world, session, ran)
    no = hook(world, "Bash", "deny", permissionDecisionReason="a person said no")
    last = result(claude(world, "", "--resume", session, *no))
    assert (last["result"], len(last["permission_denials"]), ran.exists()) == ("the end", 1, False)
    assert "a person said no" in dict(world.asked("PD")[-1].said)["tool"]


def test_deferred_again(world: World):
    """Deferred again on the resume: deferred_tool_use again, and the model is not asked."""
    session, ran = new_id(), world.root / "ran"
    first = result(deferred(world, session, ran))["deferred_tool_use"]
    last = result(claude(world, "", "--resume", session, *hook(world, "Bash", "defer")))
    assert (last["deferred_tool_use"], last["stop_reason"]) == (first, "tool_deferred")
    assert len(world.asked("PD")) == 1


def test_nothing_deferred(world: World):
    """Resumed without a prompt where nothing waits: exit 1, no event, "No deferred tool marker found"."""
    session = new_id()
    claude(world, "x", "--session-id", session)
    turn = claude(world, "", "--resume", session)
    assert (turn.status, turn.events) == (1, []) and "No deferred tool marker found" in turn.stderr


def test_prompt_after_deferred(world: World):
    """Resumed with a prompt, the waiting call is a turn of its own first: two results from one process."""
    session, ran = new_id(), world.root / "ran"
    deferred(world, session, ran)
    turn = claude(world, "PE [[say more]]", "--resume", session, *hook(world, "Bash", "allow"))
    assert [one["result"] for one in turn.of("result")] == ["the end", "more"]


def test_question_deferred(world: World):
    """AskUserQuestion, there with --permission-prompt-tool stdio, can be deferred; updatedInput has the answers."""
    session = new_id()
    prompt = f"PQ [[tool-named AskUserQuestion {json.dumps(QUESTIONS)}]] [[say the end]]"
    tool = ("--permission-prompt-tool", "stdio")
    turn = claude(world, prompt, "--session-id", session, *tool, *hook(world, "AskUserQuestion", "defer"))
    assert result(turn)["deferred_tool_use"]["input"] == QUESTIONS
    answered = {**QUESTIONS, "answers": {"Which?": "B"}}
    yes = hook(world, "AskUserQuestion", "allow", updatedInput=answered)
    assert result(claude(world, "", "--resume", session, *tool, *yes))["result"] == "the end"
    assert '"Which?"="B"' in dict(world.asked("PQ")[-1].said)["tool"]
    claude(world, "PN")
    offered = {word: "AskUserQuestion" in world.asked(word)[-1].tools for word in ("PQ", "PN")}
    assert offered == {"PQ": True, "PN": False}


def test_bare_has_no_hooks(world: World):
    """--bare drops the hooks of --settings without a word; --setting-sources "" keeps them."""
    kept = claude(world, "[[tool echo x]]", "--setting-sources", "", *hook(world, "Bash", "defer"))
    assert result(kept)["stop_reason"] == "tool_deferred"
    bare = claude(world, "[[tool echo x]]", "--bare", *hook(world, "Bash", "defer"))
    assert result(bare)["stop_reason"] == "end_turn"


def test_two_deferred_at_once(world: World):
    """Of two calls deferred in one message the last one waits; the first is gone from the conversation, unrun."""
    session, one, two = new_id(), world.root / "one", world.root / "two"
    prompt = f"PT [[together]] [[tool echo x > {one}]] [[tool echo x > {two}]]"
    turn = claude(world, prompt, "--session-id", session, *hook(world, "Bash", "defer"))
    assert str(two) in result(turn)["deferred_tool_use"]["input"]["command"]
    claude(world, "", "--resume", session, *hook(world, "Bash", "allow"))
    assert (one.exists(), two.exists()) == (False, True)
    assert len([text for _, text in world.stub.wait_for("PT", 2)[1].said if text.startswith("<tool ")]) == 1


def talk(world: World, prompt: str, answer: Callable[[Json], Json]) -> list[Json]:
    """A turn with JSON both ways, in which each can_use_tool request is answered so."""
    argv = claude_argv(world, "--input-format", "stream-json", "--permission-prompt-tool", "stdio")
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=world.folder, env=world.environment, text=True
    ) as process:
        assert process.stdin and process.stdout

        def say(message: Json) -> None:
            print(json.dumps(message), file=process.stdin, flush=True)

        say({"type": "user", "message": {"role": "user", "content": prompt}})
        events: list[Json] = []
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["type"] == "control_request":
                said = {"subtype": "success", "request_id": events[-1]["request_id"]}
                say({"type": "control_response", "response": {**said, "response": answer(events[-1]["request"])}})
            if events[-1]["type"] == "result":
                process.stdin.close()
    return events


def test_asking_while_it_runs(world: World):
    """--permission-prompt-tool stdio with stream-json input asks by control_request can_use_tool, and takes a yes."""
    ran = world.root / "ran"
    events = talk(world, f"[[tool echo x > {ran}]] [[say the end]]", lambda _: {"behavior": "allow"})
    (request,) = [one["request"] for one in events if one["type"] == "control_request"]
    assert (request["subtype"], request["tool_name"]) == ("can_use_tool", "Bash")
    assert (events[-1]["result"], ran.exists()) == ("the end", True)


def test_told_no_while_it_runs(world: World):
    """The message of a deny is what the model gets as the tool's result."""
    events = talk(world, "PY [[tool touch /x]]", lambda _: {"behavior": "deny", "message": "a person said no"})
    assert events[-1]["subtype"] == "success"
    assert world.asked("PY")[-1].said[-1] == ("tool", "<result a person said no>")
