"""How the tests call the two commands: for an answer that a machine can read, and with no retries inside."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.real_agents.install import known
from tests.real_agents.world import Json, Running, Turn, World

_NO_RETRIES = {"CLAUDE_CODE_MAX_RETRIES": "0"}


def new_id() -> str:
    return str(uuid.uuid4())


def claude_argv(world: World, *options: str) -> list[str]:
    command = str(known()["claude-code"].path(world.cache))
    return [command, "-p", "--output-format", "stream-json", "--verbose", "--model", "claude-sonnet-4-5", *options]


def claude(world: World, prompt: str, *options: str, folder: Path | None = None, **more: str) -> Turn:
    return world.run(claude_argv(world, *options), prompt, folder, **_NO_RETRIES | more)


def start_claude(world: World, prompt: str, *options: str, **more: str) -> Running:
    return world.start(claude_argv(world, *options), prompt, **_NO_RETRIES | more)


def codex_argv(world: World, *words: str) -> list[str]:
    """`words` are what comes after `codex exec`: a verb or none, options, the thread's id or none."""
    command = str(known()["codex"].path(world.cache))
    verbs = [word for word in words[:1] if word in {"resume", "fork"}]
    return [command, "exec", *verbs, "--json", "--skip-git-repo-check", *words[len(verbs) :], "-"]


def codex(world: World, prompt: str, *words: str, folder: Path | None = None, **more: str) -> Turn:
    return world.run(codex_argv(world, *words), prompt, folder, **more)


def start_codex(world: World, prompt: str, *words: str, **more: str) -> Running:
    return world.start(codex_argv(world, *words), prompt, **more)


def result(turn: Turn) -> Json:
    """The one `result` event of a turn of Claude Code."""
    found = turn.of("result")
    assert len(found) == 1, f"{len(found)} results: {turn}"
    return found[0]


def completed(turn: Turn) -> Json:
    """The one `turn.completed` event of a turn of Codex."""
    found = turn.of("turn.completed")
    assert len(found) == 1, f"{len(found)} completed turns: {turn}"
    return found[0]


def thread(turn: Turn) -> str:
    """The id that Codex gave the thread."""
    return str(turn.of("thread.started")[0]["thread_id"])


def answer(turn: Turn) -> str:
    """The last message of a turn of Codex."""
    return str([one["item"]["text"] for one in turn.of("item.completed") if one["item"]["type"] == "agent_message"][-1])
