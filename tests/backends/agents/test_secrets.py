"""Errors of agents say nothing of the secrets that plait gave them, whatever these look like."""

from __future__ import annotations

import pytest

from plait.backends.agents.agent_catalog import AGENTS
from plait.errors import BackendError
from tests.support.agents.homes import Home, send

GIVEN = {
    "ANTHROPIC_API_KEY": "gateway-1234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "ANTHROPIC_CUSTOM_HEADERS": "X-Team: blue-team-9\nAuthorization: Token custom-7654321",
    "MY_PASSWORD": "correct-horse",
    "MY_TOKENS": "short",
}


@pytest.fixture(autouse=True)
def _given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)


OWNERS = {
    ("CLAUDE_", "ANTHROPIC_MODEL", "ANTHROPIC_CUSTOM_HEADERS", "AWS_"): {"claude-code", "claude-agent-acp"},
    ("IS_SANDBOX",): {"claude-code"},
    ("CODEX_",): {"codex", "codex-acp"},
    ("GEMINI_CLI_", "GEMINI_MODEL", "GEMINI_SYSTEM_MD", "GOOGLE_GENAI_"): {"gemini"},
    ("GOOSE_", "ANTHROPIC_HOST", "OPENAI_HOST"): {"goose"},
    ("OPENCODE_",): {"opencode"},
    ("DASHSCOPE_", "QWEN_", "OPENAI_MODEL"): {"qwen"},
}


@pytest.mark.parametrize("names", OWNERS)
def test_an_agent_gets_no_variable_that_only_another_agent_reads(names: tuple[str, ...]) -> None:
    receivers = {agent.name for agent in AGENTS if any(name.startswith(names) for name in agent.passes)}
    assert receivers == OWNERS[names]


async def complain(home: Home, words: str) -> BackendError:
    """The error of an agent that dies with these last words."""
    program = home.path / "claude"
    program.unlink()
    program.write_text(f"#!/bin/sh\nprintf %s '{words}' >&2\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(BackendError) as caught:
        await send(home.claude(pass_env=("MY_PASSWORD", "MY_TOKENS")), "One.")
    return caught.value


async def test_secrets_that_an_agent_was_given_are_not_shown(home: Home) -> None:
    said = " ".join([*GIVEN.values(), "custom-7654321"]).replace("\n", " ")
    error = await complain(home, said)
    assert error.message.endswith(": *** *** X-Team: *** Authorization: *** *** short ***")
    assert "gateway" not in repr(error)


async def test_nor_is_what_a_cut_has_left_of_one(home: Home) -> None:
    whole = await complain(home, "x" * 200)
    before = len(whole.message) - 200
    for shown in (5, 10):
        error = await complain(home, "x" * (299 - before - shown) + GIVEN["ANTHROPIC_API_KEY"])
        assert error.message.endswith("x***…")
