"""What the adapter of Gemini CLI relies on, asked of the command itself."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.real_agents.calls import gemini, gemini_argv, new_id, result, start_gemini
from tests.real_agents.install import known
from tests.real_agents.world import Turn, World, marked, until, waiting_tool

pytestmark = pytest.mark.clis("gemini-cli", "node")
NEVER = "[[until /nowhere/to/be/seen]]"


def text(turn: Turn) -> str:
    return "".join(str(one["content"]) for one in turn.of("message", role="assistant"))


def usage(turn: Turn) -> list[int]:
    stats = result(turn)["stats"]
    return [stats["input_tokens"], stats["output_tokens"], stats["cached"]]


def no_retries(world: World) -> None:
    settings = world.home / ".gemini" / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"general": {"maxAttempts": 1}}))


def test_version(world: World):
    """`gemini --version` says the version that was tested."""
    cli = known()["gemini-cli"]
    assert cli.version in world.run([str(cli.path(world.cache)), "--version"]).stdout


def test_a_turn_and_a_resume(world: World):
    """--session-id: init with that id, deltas, result; --resume shows the turn once; stats are each process's own."""
    session = new_id()
    first = gemini(world, "GR1 [[say the answer]]", "--session-id", session)
    assert (first.events[0]["type"], first.events[0]["session_id"]) == ("init", session)
    assert (text(first), result(first)["status"], first.status) == ("the answer", "success", 0)
    second = gemini(world, "GR2", "--resume", session)
    assert [usage(first), usage(second)] == [[11, 7, 5], [13, 7, 5]]
    assert [said for _, said in world.asked("GR1")[-1].said] == ["GR1 [[say the answer]]", "the answer", "GR2"]


def test_unknown_session_or_one_in_use(world: World):
    """Unknown to --resume, in use for --session-id, another folder's: exit 42, no event, its own words on stderr."""
    session, elsewhere = new_id(), world.root / "elsewhere"
    elsewhere.mkdir()
    gemini(world, "x", "--session-id", session)
    again = gemini(world, "x", "--session-id", session)
    unknown = gemini(world, "x", "--resume", new_id())
    moved = gemini(world, "x", "--resume", session, folder=elsewhere)
    assert [(one.status, one.events) for one in (again, unknown, moved)] == [(42, [])] * 3
    assert "already exists. Use --resume" in again.stderr
    assert "Invalid session identifier" in unknown.stderr
    assert "No previous sessions found for this project" in moved.stderr


def test_killed_turn(world: World):
    """After SIGKILL the model sees the killed prompt once, then the new one, as parts of one message."""
    session = new_id()
    running = start_gemini(world, f"GK1 {NEVER}", "--session-id", session)
    world.stub.wait_for("GK1")
    running.kill()
    gemini(world, "GK2", "--resume", session)
    last = world.asked("GK2")[-1]
    assert (last.said, last.messages) == ([("user", f"GK1 {NEVER}"), ("user", "GK2")], 1)


def test_terminated_turn(world: World):
    """SIGTERM in a turn: exit 0 without a result, so no result is no success."""
    running = start_gemini(world, f"GT {NEVER}")
    world.stub.wait_for("GT")
    os.kill(running.process.pid, signal.SIGTERM)
    turn = running.wait()
    assert (turn.status, turn.of("result")) == (0, [])


@pytest.mark.parametrize(("status", "code"), [(401, 145), (429, 173), (500, 244)])
def test_refused_by_the_model(world: World, status: int, code: int):
    """With maxAttempts 1 an error of the API is one request; result says error, exit is the status modulo 256."""
    no_retries(world)
    turn = gemini(world, f"GQ{status} [[error {status}]]")
    assert (turn.status, result(turn)["status"]) == (code, "error")
    assert f"stub error {status}" in result(turn)["error"]["message"]
    assert len(world.asked(f"GQ{status}")) == 1


def test_no_connection(world: World):
    """Nobody at the address, with maxAttempts 1: a result with status error at once."""
    no_retries(world)
    turn = gemini(world, "x", GOOGLE_GEMINI_BASE_URL="http://127.0.0.1:9")
    assert turn.status != 0 and result(turn)["status"] == "error" and turn.seconds < 60


def test_settings_of_our_own(world: World):
    """A file named by GEMINI_CLI_SYSTEM_SETTINGS_PATH is read beside the user's, unless others may write above it."""
    user = world.home / ".gemini" / "settings.json"
    given = user.read_text()
    user.unlink()
    with tempfile.TemporaryDirectory(dir=world.cache) as folder:
        (Path(folder) / "settings.json").write_text(given)
        turn = gemini(world, "x", GEMINI_CLI_SYSTEM_SETTINGS_PATH=f"{folder}/settings.json")
        assert result(turn)["status"] == "success"
        Path(folder).chmod(0o777)
        turn = gemini(world, "x", GEMINI_CLI_SYSTEM_SETTINGS_PATH=f"{folder}/settings.json")
        assert turn.status == 41 and "Skipping system settings file" in turn.stderr


def test_outlives_its_parent(world: World):
    """With its output in a file it goes on to the end when the process that started it is killed."""
    go, place = world.root / "go", world.root / "orphan"
    (world.root / "prompt").write_text(f"GP [[until {go}]] [[say still here]]")
    shell = f"{' '.join(gemini_argv(world))} < {world.root}/prompt > {place} & wait"
    running = world.start(["sh", "-c", shell], GEMINI_CLI_NO_RELAUNCH="true")
    world.stub.wait_for("GP")
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.process.wait() == -signal.SIGKILL
    go.touch()
    until(lambda: '"type":"result"' in place.read_text(), "a result in the file")


def test_marker(world: World):
    """A variable of its environment is in that of the shell tool's processes, which a SIGKILL of its group spares."""
    with waiting_tool(world) as (tool, here):
        running = start_gemini(world, f"GM {tool}", "--yolo", PLAIT_TURN="marker-gm")
        until(here.exists, "the tool at work")
        assert len(marked("PLAIT_TURN=marker-gm")) >= 2
        running.kill()
        left = marked("PLAIT_TURN=marker-gm")
    assert left
    until(lambda: not marked("PLAIT_TURN=marker-gm"), f"the end of {left}")


def test_system_prompt(world: World):
    """GEMINI_SYSTEM_MD names a file that replaces the system prompt."""
    (world.root / "prompt.md").write_text("You are a lighthouse.")
    gemini(world, "GS1", GEMINI_SYSTEM_MD=str(world.root / "prompt.md"))
    assert world.asked("GS1")[-1].system.startswith("You are a lighthouse.")


def test_beyond_the_context(world: World):
    """A prompt that does not fit into the model's context is sent to nobody; the turn is a success without a word."""
    turn = gemini(world, "GB " + "lorem ip " * 500_000)
    assert (result(turn)["status"], turn.of("message", role="assistant")) == ("success", [])
    assert world.stub.requests() == []


def test_no_shell_by_default(world: World):
    """Without an approval mode the shell tool is not there at all."""
    assert "no shell tool is offered" in text(gemini(world, "GN [[tool echo x]]"))
