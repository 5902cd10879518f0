"""How Claude Code tells that a turn failed: what its adapter takes errors from."""

from __future__ import annotations

import os

import pytest

from tests.real_agents.calls import claude, new_id, result
from tests.real_agents.world import World
from tests.support.sizes import size

pytestmark = pytest.mark.clis("claude-code")


def test_unknown_session(world: World):
    """--resume of an unknown id: exit 1, a result with `errors` that says there is no such conversation."""
    turn = claude(world, "x", "--resume", new_id())
    assert turn.status == 1 and result(turn)["is_error"]
    assert result(turn)["errors"][0].startswith("No conversation found with session ID")


def test_session_in_use(world: World):
    """--session-id of a session that exists: exit 1, no event, "already in use" on stderr."""
    session = new_id()
    claude(world, "x", "--session-id", session)
    turn = claude(world, "y", "--session-id", session)
    assert (turn.status, turn.events) == (1, []) and "is already in use" in turn.stderr


def test_not_logged_in(world: World):
    """Without a key and a login: a result that is_error and says "Not logged in", exit 1, nothing asked."""
    turn = claude(world, "CL", ANTHROPIC_API_KEY="")
    assert (turn.status, result(turn)["is_error"]) == (1, True)
    assert result(turn)["result"].startswith("Not logged in") and world.asked("CL") == []


def test_wrong_options(world: World):
    """An option that it does not know, or one with a wrong word: exit 1, no event, `error: ...` on stderr."""
    for option, said in (("--no-such-option", "error: unknown option"), ("--permission-mode=x", "is invalid. Allowed")):
        turn = claude(world, "x", option)
        assert (turn.status, turn.events) == (1, []) and said in turn.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root is refused")
def test_startup_failure_as_a_result(world: World):
    """With CLAUDE_CODE_STARTUP_FAILURE_RESULTS=1 what root may not do is a result with a startup_failure_reason."""
    more = {"CLAUDE_CODE_STARTUP_FAILURE_RESULTS": "1"}
    turn = claude(world, "x", "--permission-mode", "bypassPermissions", **more)
    assert (turn.status, result(turn)["startup_failure_reason"]) == (1, "bypass_root")


@pytest.mark.parametrize("prompt", ["/clear", *size([], ["/cost", "/exit"])])
def test_a_command_of_its_own(world: World, prompt: str):
    """A prompt that is a command of Claude Code's is a success in no turn, with no tokens and no request."""
    turn = claude(world, prompt)
    last = result(turn)
    assert (turn.status, last["subtype"], last["is_error"], last["num_turns"]) == (0, "success", False, 0)
    assert (last["usage"]["output_tokens"], last["modelUsage"], world.stub.requests()) == (0, {}, [])


def test_no_command_of_its_own(world: World):
    """A prompt that begins with a slash and no command is a prompt like others, such as a path."""
    for prompt in ("/home/ada/notes.txt [[say read]]", "/nosuchcommand [[say read]]"):
        assert result(claude(world, prompt))["result"] == "read"
        assert world.stub.requests()[-1].prompts[-1] == prompt


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, "authentication_error"), (429, "rate_limit_error"), (500, "api_error"), (529, "overloaded_error")],
)
def test_refused_by_the_model(world: World, status: int, kind: str):
    """With CLAUDE_CODE_MAX_RETRIES=0 an error of the API is one request; the result says success, is_error, status."""
    turn = claude(world, f"CQ{status} [[error {status}]]")
    last = result(turn)
    assert turn.status == 1 and turn.seconds < 60
    assert (last["subtype"], last["is_error"], last["terminal_reason"]) == ("success", True, "api_error")
    assert (last["api_error_status"], last["api_error_type"]) == (status, kind)
    assert len(world.asked(f"CQ{status}")) == 1


def test_too_long_for_the_model(world: World):
    """A prompt that is too long for the model: terminal_reason prompt_too_long."""
    turn = claude(world, "[[error 400 prompt is too long: 210000 tokens > 200000 maximum]]")
    assert (result(turn)["is_error"], result(turn)["terminal_reason"]) == (True, "prompt_too_long")


def test_no_connection(world: World):
    """Nobody at the address: api_error connection_failed, no status, with no retries at once."""
    turn = claude(world, "x", ANTHROPIC_BASE_URL="http://127.0.0.1:9")
    last = result(turn)
    assert (turn.status, last["is_error"], last["api_error"]) == (1, True, "connection_failed")
    assert last["api_error_status"] is None and turn.seconds < 60


def test_retries_are_told(world: World):
    """With retries on, a wait is a system/api_retry event with its length and the status."""
    turn = claude(world, "CY [[error 429 retry-after 1 once]]", CLAUDE_CODE_MAX_RETRIES="2")
    (wait,) = turn.of("system", subtype="api_retry")
    assert (wait["error_status"], wait["error"], wait["attempt"]) == (429, "rate_limit", 1)
    assert wait["retry_delay_ms"] >= 1000 and not result(turn)["is_error"]
