"""What the adapter of Claude Code relies on, asked of the command itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence

import pytest

from tests.real_agents.calls import claude, claude_argv, new_id, result, start_claude
from tests.real_agents.install import known
from tests.real_agents.world import Json, Turn, World, events_in, marked, until, waiting_tool

pytestmark = pytest.mark.clis("claude-code")
NEVER = "[[until /nowhere/to/be/seen]]"
BASH = ("--allowedTools", "Bash")


def usage(turn: Turn) -> list[int]:
    counted = result(turn)["usage"]
    return [counted["input_tokens"], counted["output_tokens"], counted["cache_read_input_tokens"]]


def model_usage(turn: Turn, name: str) -> list[int]:
    counted = result(turn)[name]["claude-sonnet-4-5"]
    return [counted["inputTokens"], counted["outputTokens"], counted["cacheReadInputTokens"]]


def killed_while(world: World, word: str, prompt: str, *options: str, requests: int = 1) -> Turn:
    """Killed when the model has had that many requests about the word and its session's file holds what was said.

    The file is written up to about half a second later than the events.
    """
    running = start_claude(world, prompt, *options)
    world.stub.wait_for(word, requests)

    def is_written() -> bool:
        said = [one for one in events_in(running.stdout.read_text()) if one["type"] in {"assistant", "user"}]
        texts = [f'"content":"{word}', *(f'"uuid":"{one["uuid"]}"' for one in said)]
        return len(said) >= 2 * (requests - 1) and all(text in _sessions(world) for text in texts)

    until(is_written, f"the session's file with {word}")
    return running.kill()


def _sessions(world: World) -> str:
    files = (world.home / ".claude" / "projects").rglob("*.jsonl")
    return "".join(file.read_text(errors="replace") for file in files)


def test_version(world: World):
    """`claude --version` says the version that was tested."""
    cli = known()["claude-code"]
    assert cli.version in world.run([str(cli.path(world.cache)), "--version"]).stdout


def test_a_turn(world: World):
    """With --session-id and the prompt on standard input: init with that id first, then assistant, then one result."""
    session = new_id()
    turn = claude(world, "one [[say the answer]]", "--session-id", session)
    first = turn.events[0]
    assert (first["type"], first["subtype"], first["session_id"]) == ("system", "init", session)
    last = result(turn)
    assert (last["subtype"], last["is_error"], last["result"]) == ("success", False, "the answer")
    assert (last["stop_reason"], last["terminal_reason"], turn.status) == ("end_turn", "completed", 0)


def test_long_prompt(world: World):
    """300 kB of prompt come by standard input, every byte of them."""
    turn = claude(world, f"[[say got it]] {'long ' * 60_000}END")
    assert result(turn)["result"] == "got it"
    assert world.asked("long long")[-1].prompts[-1].endswith("long END")


def test_resume_and_counters(world: World):
    """--resume shows each earlier turn once; usage is the turn's, total_cost_usd and modelUsage are the session's."""
    session = new_id()
    first = claude(world, "CR1", "--session-id", session)
    second = claude(world, "CR2", "--resume", session)
    assert [usage(first), usage(second)] == [[11, 7, 5], [13, 7, 5]]
    assert model_usage(second, "modelUsage") == [24, 14, 10]
    assert model_usage(second, "model_usage_since_last_result") == [13, 7, 5]
    assert result(second)["total_cost_usd"] > result(first)["total_cost_usd"]
    assert [said for _, said in world.asked("CR1")[-1].said] == ["CR1", result(first)["result"], "CR2"]


def test_resume_elsewhere(world: World):
    """--resume finds the session from another working folder."""
    session = new_id()
    claude(world, "CE1", "--session-id", session)
    elsewhere = world.root / "elsewhere"
    elsewhere.mkdir()
    assert not result(claude(world, "CE2", "--resume", session, folder=elsewhere))["is_error"]
    assert world.asked("CE1")[-1].prompts == ["CE1", "CE2"]


def test_system_prompt(world: World):
    """--system-prompt-file replaces the system prompt, --append-system-prompt-file adds to it; a resume keeps it."""
    (world.root / "prompt").write_text("You are a lighthouse.")
    session = new_id()
    claude(world, "CS1", "--session-id", session, "--system-prompt-file", str(world.root / "prompt"))
    claude(world, "CS2", "--resume", session)
    claude(world, "CS3", "--append-system-prompt-file", str(world.root / "prompt"))
    first, second, added = (world.asked(word)[-1].system for word in ("CS1", "CS2", "CS3"))
    assert len(first) < 2000 and "You are a lighthouse." in first and "You are a lighthouse." in second
    assert len(added) > 5000 and "You are a lighthouse." in added


def test_fork(world: World):
    """--fork-session --session-id NEW goes on under the new id from the parent's totals; the parent stays as it is."""
    parent, fork = new_id(), new_id()
    claude(world, "CF1", "--session-id", parent)
    forked = claude(world, "CF2", "--resume", parent, "--fork-session", "--session-id", fork)
    assert forked.events[0]["session_id"] == fork
    assert (usage(forked), model_usage(forked, "modelUsage")) == ([13, 7, 5], [24, 14, 10])
    later = claude(world, "CF3", "--resume", parent)
    assert world.asked("CF3")[-1].prompts == ["CF1", "CF3"]
    assert model_usage(later, "modelUsage") == [24, 14, 10]
    claude(world, "CF4", "--resume", fork)
    assert world.asked("CF4")[-1].prompts == ["CF1", "CF2", "CF4"]


def test_killed_turn(world: World):
    """After SIGKILL the model sees the killed prompt once, a "No response requested.", then the new prompt."""
    session = new_id()
    killed_while(world, "CK1", f"CK1 {NEVER}", "--session-id", session)
    claude(world, "CK2", "--resume", session)
    said = world.asked("CK2")[-1].said
    assert said == [("user", f"CK1 {NEVER}"), ("assistant", "No response requested."), ("user", "CK2")]


def test_killed_before_written(world: World):
    """A turn that was killed before its session was written: the id is unknown to --resume, free for --session-id."""
    session = new_id()
    running = start_claude(world, f"CW {NEVER}", "--session-id", session)
    running.kill()
    assert result(claude(world, "x", "--resume", session))["errors"]
    assert not result(claude(world, "CW2", "--session-id", session))["is_error"]


def test_rewind(world: World):
    """--resume-session-at an assistant's uuid drops the killed prompt after it, for good."""
    session = new_id()
    last = claude(world, "CT1", "--session-id", session).of("assistant")[-1]["uuid"]
    killed_while(world, "CT2", f"CT2 {NEVER}", "--resume", session)
    claude(world, "CT2 again", "--resume", session, "--resume-session-at", last)
    assert world.asked("CT2 again")[-1].prompts == ["CT1", "CT2 again"]
    claude(world, "CT3", "--resume", session)
    assert world.asked("CT3")[-1].prompts == ["CT1", "CT2 again", "CT3"]


def test_rewind_to_a_tool_result(world: World):
    """--resume-session-at the uuid of a tool's result keeps the call and its result, and adds nothing of its own."""
    session, prompt = new_id(), f"CU1 [[tool echo RAN42]] {NEVER}"
    killed = killed_while(world, "CU1", prompt, *BASH, "--session-id", session, requests=2)
    last = killed.of("user")[-1]["uuid"]
    claude(world, "CU2", *BASH, "--resume", session, "--resume-session-at", last)
    said = world.asked("CU2")[-1].said
    assert [role for role, _ in said] == ["user", "assistant", "tool", "user"]
    assert (said[2][1], said[3][1]) == ("<result RAN42>", "CU2")


def test_rewind_to_what_was_not_written(world: World):
    """--resume-session-at a uuid that the session's file lacks: exit 1, a result with `errors`, nothing asked."""
    session = new_id()
    claude(world, "CN1", "--session-id", session)
    turn = claude(world, "CN2", "--resume", session, "--resume-session-at", new_id())
    assert turn.status == 1 and result(turn)["is_error"]
    assert result(turn)["errors"][0].startswith("No message found with message.uuid of")
    assert world.asked("CN2") == []


def test_killed_turn_is_not_in_the_totals(world: World):
    """What a killed turn's requests cost is in no later total: only its own assistant events tell of it."""
    session = new_id()
    claude(world, "CV1", "--session-id", session)
    prompt = f"CV2 [[tool echo hi]] {NEVER}"
    killed = killed_while(world, "CV2", prompt, *BASH, "--resume", session, requests=2)
    assert [one["message"]["usage"]["input_tokens"] for one in killed.of("assistant")] == [13]
    after = claude(world, "CV3", "--resume", session)
    assert model_usage(after, "modelUsage")[0] == 11 + usage(after)[0]


def test_outlives_its_parent(world: World):
    """With its output in a file it goes on to the end when the process that started it is killed."""
    go = world.root / "go"
    prompt = f"CP [[until {go}]] [[say still here]]"
    place = world.root / "orphan"
    (world.root / "prompt").write_text(prompt)
    argv = claude_argv(world, "--session-id", new_id())
    shell = f"{' '.join(argv)} < {world.root}/prompt > {place} & wait"
    running = world.start(["sh", "-c", shell])
    world.stub.wait_for("CP")
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.process.wait() == -signal.SIGKILL
    go.touch()
    until(lambda: '"type":"result"' in place.read_text(), "a result in the file")
    assert '"result":"still here"' in place.read_text()


def test_marker(world: World):
    """A variable of its environment is in that of the shell tool's processes, which a SIGKILL of its group spares."""
    with waiting_tool(world) as (tool, here):
        running = start_claude(world, f"CM {tool}", *BASH, PLAIT_TURN="marker-cm")
        until(here.exists, "the tool at work")
        assert len(marked("PLAIT_TURN=marker-cm")) >= 2
        running.kill()
        left = marked("PLAIT_TURN=marker-cm")
    assert left
    until(lambda: not marked("PLAIT_TURN=marker-cm"), f"the end of {left}")


def test_structured_answer(world: World):
    """--json-schema: the answer is in structured_output; an answer in plain words is a success without it."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    given = result(claude(world, 'CJ [[json {"a": 1}]]', "--json-schema", schema))
    assert (given["structured_output"], given["is_error"]) == ({"a": 1}, False)
    plain = result(claude(world, "CJ [[say no json]]", "--json-schema", schema))
    assert "structured_output" not in plain and (plain["subtype"], plain["is_error"]) == ("success", False)


def test_schemas_that_it_refuses(world: World):
    """A word that its check does not know, and a version by name, end it before it asks anything."""
    for more in ({"prefixItems": []}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}):
        turn = claude(world, "CR", "--json-schema", json.dumps({"type": "object", **more}))
        assert (turn.status, turn.stdout) == (1, "")
        assert "Error: --json-schema is not a valid JSON Schema: " in turn.stderr
    assert world.stub.requests() == []


def test_denied(world: World):
    """A tool that nobody allowed does not run; the result is a success that lists it in permission_denials."""
    ran = world.root / "ran"
    last = result(claude(world, f"CD [[tool echo x > {ran}]]"))
    assert [one["tool_name"] for one in last["permission_denials"]] == ["Bash"]
    assert (last["is_error"], ran.exists()) == (False, False)


def test_partial_messages(world: World):
    """--include-partial-messages: the whole usage of each message is in a stream_event message_delta."""
    turn = claude(world, "CI", "--include-partial-messages")
    deltas: Sequence[Json] = [one["event"] for one in turn.of("stream_event")]
    assert [one["usage"]["output_tokens"] for one in deltas if one["type"] == "message_delta"] == [7]
