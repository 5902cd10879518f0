"""How Claude Code is started: what becomes an argument, and what never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.backends.agents.agent_output import AgentCall
from plait.backends.agents.claude_code import ClaudeCodeBackend

COMMON = ["-p", "--output-format=stream-json", "--verbose", "--include-partial-messages"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"session_id": "N"}, ["--session-id=N"]),
        ({"session_id": "S", "resume": True}, ["--resume=S"]),
        ({"session_id": "S", "resume": True, "forks": "old"}, ["--resume=S"]),
        ({"session_id": "S", "resume": True, "rewind_to": "m"}, ["--resume=S", "--resume-session-at=m"]),
        ({"session_id": "N", "forks": "P"}, ["--resume=P", "--fork-session", "--session-id=N"]),
        (
            {"session_id": "N", "output_schema": {"type": "object"}},
            ["--session-id=N", '--json-schema={"type": "object"}'],
        ),
    ],
)
def test_arguments_for_each_form_of_a_call(call: dict[str, Any], arguments: list[str], tmp_path: Path) -> None:
    assert ClaudeCodeBackend().arguments(AgentCall(folder=tmp_path, **call)) == COMMON + arguments
    assert list(tmp_path.iterdir()) == []


def test_every_option_becomes_an_argument_and_prompts_stay_out_of_them(tmp_path: Path) -> None:
    program = ClaudeCodeBackend(
        model="m",
        permission_mode="acceptEdits",
        allowed_tools=("Bash(git *)", "--dangerously-skip-permissions"),
        disallowed_tools=("WebFetch",),
        tools=("Bash", "Read"),
        system="Be brief: ä.",
        append_system="And kind.",
        max_turns=3,
        max_budget_usd=0.5,
        bare=True,
        base_url="http://127.0.0.1:1",
    )
    assert program.arguments(AgentCall(folder=tmp_path)) == [
        *COMMON,
        "--bare",
        "--model=m",
        "--permission-mode=acceptEdits",
        "--tools=Bash,Read",
        "--max-turns=3",
        "--max-budget-usd=0.5",
        f"--system-prompt-file={tmp_path}/system-prompt.txt",
        f"--append-system-prompt-file={tmp_path}/append-system-prompt.txt",
        "--allowedTools=Bash(git *)",
        "--allowedTools=--dangerously-skip-permissions",
        "--disallowedTools=WebFetch",
    ]
    assert (tmp_path / "system-prompt.txt").read_text(encoding="utf-8") == "Be brief: ä."
    assert program.environment(AgentCall(folder=tmp_path))["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"


def test_nothing_is_granted_that_was_not_asked_for(tmp_path: Path) -> None:
    assert ClaudeCodeBackend().arguments(AgentCall(folder=tmp_path)) == COMMON
    assert ClaudeCodeBackend(tools=()).arguments(AgentCall(folder=tmp_path)) == [*COMMON, "--tools="]
    environment = ClaudeCodeBackend().environment(AgentCall(folder=tmp_path))
    assert environment["CLAUDE_CODE_MAX_RETRIES"] == "0"
    assert environment["CLAUDE_CODE_TMPDIR"] == str(tmp_path)


def test_variables_of_every_way_to_its_models_are_passed_on() -> None:
    ways = {"ANTHROPIC_FOUNDRY_RESOURCE", "AWS_CONFIG_FILE", "GOOGLE_APPLICATION_CREDENTIALS"}
    models = {f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("HAIKU", "OPUS", "SONNET")}
    assert ways | models | {"MAX_THINKING_TOKENS"} <= {*ClaudeCodeBackend().passes}
