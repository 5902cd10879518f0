"""The agents that speak ACP, for tests: AcpBackend on the real commands, and talking to them by hand.

As a program it has one turn with an agent, to be killed:
`python -m tests.real_agents.acp_agents NAME ROOT CACHE`, with the
prompt on standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends import AcpBackend, ConversationRequest, Reply
from plait.usage import Usage
from tests.real_agents.install import known
from tests.real_agents.one_turn import files_of
from tests.real_agents.stub import Request
from tests.real_agents.world import World, until

NEVER = "[[until /nowhere/to/be/seen]]"
QUICK = ("goose", "codex-acp", "claude-agent-acp")
"""A turn takes about a second; with the others it is many."""


@dataclass(frozen=True)
class Agent:
    """How an agent is started, so that it asks for permission where it is able to ask. `cli` is its name in
    `versions.json`, `allow` the name of the option that allows something once. `environment` is for those that are
    talked to by hand.
    """

    cli: str
    words: tuple[str, ...] = ()
    mode: str | None = None
    model: str | None = None
    allow: str = ""
    cached_beside: bool = False
    """It counts what was cached beside the rest."""
    last_alone: bool = False
    """It tells of the tokens of its last request alone."""
    tries: int = 1
    """So often it asks the model before it says that there is a limit."""
    as_it_goes: bool = False
    """It tells of the tokens of each request at once, so that those of a turn that was cut are known."""
    environment: dict[str, str] = field(default_factory=dict[str, str])


AGENTS = {
    "goose": Agent("goose", ("acp",), "approve", allow="allow_once", last_alone=True, tries=4),
    "codex-acp": Agent("codex-acp"),
    "claude-agent-acp": Agent("claude-agent-acp", allow="Yes", cached_beside=True),
    "gemini": Agent(
        "gemini-cli",
        ("--acp",),
        model="gemini-2.5-flash",
        allow="Allow",
        # Left to choose a model it asks another one first, again and again for minutes where the answer is no choice.
        environment={"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_MODEL": "gemini-2.5-flash"},
    ),
    "qwen": Agent("qwen-code", ("--acp",), "default", allow="Allow", as_it_goes=True),
    "opencode": Agent("opencode", ("acp",), allow="Allow once", last_alone=True),
}


def agents(*names: str) -> pytest.MarkDecorator:
    """For each of these. The slow ones are in as few tests as will do."""
    marked = [pytest.param(name, marks=pytest.mark.clis(AGENTS[name].cli, "node")) for name in names]
    return pytest.mark.parametrize("name", marked)


def acp_environment(world: World) -> dict[str, str]:
    """The world's, with the settings by which agents ask, and wait for nothing."""
    opencode = json.loads(world.environment["OPENCODE_CONFIG_CONTENT"])
    opencode["permission"] = {"bash": "ask", "edit": "ask"}
    return world.environment | {
        "OPENCODE_CONFIG_CONTENT": json.dumps(opencode),
        "GOOSE_PROVIDER_SKIP_BACKOFF": "true",  # it tries four times, whatever the error
    }


def backend_of(name: str, world: World, **options: Any) -> AcpBackend:
    """plait's backend on the real command."""
    agent = AGENTS[name]
    command = (str(known()[agent.cli].path(world.cache)), *agent.words)
    passes = ("STUB_KEY", "GOOSE_PROVIDER_SKIP_BACKOFF")
    options = {"model": agent.model, "mode": agent.mode, "pass_env": passes, **options}
    return AcpBackend(command=command, cwd=world.folder, **options)


async def send(backend: AcpBackend, prompt: str, **request: Any) -> Reply:
    """One turn."""
    async with backend.open(ConversationRequest(**request)) as conversation:
        return await conversation.send(prompt)


def counted(name: str, requests: list[Request]) -> Usage:
    """What those requests cost by the stub's own count, as far as the agent tells."""
    usages = [one.usage for one in requests if one.usage][-1 if AGENTS[name].last_alone else 0 :]
    cached = sum(one["cached"] for one in usages) if AGENTS[name].cached_beside else 0
    return Usage(sum(one["input"] for one in usages) + cached, sum(one["output"] for one in usages))


def tokens(usage: Usage) -> Usage:
    """Without the cost in money."""
    return Usage(usage.input_tokens, usage.output_tokens)


def main_requests(world: World, prompt: str) -> list[Request]:
    """What the model was asked about a prompt, without what agents ask it beside: titles, memories, suggestions."""
    return [one for one in world.asked(prompt) if one.prompts and one.prompts[-1].startswith(prompt)]


def die(name: str, world: World, prompt: str, requests: int = 1) -> None:
    """A runner has a turn, and is killed in the middle of it."""
    argv = [sys.executable, "-m", "tests.real_agents.acp_agents", name, str(world.root), str(world.cache)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdin
        runner.stdin.write(prompt.encode())
        runner.stdin.close()
        try:
            until(lambda: len(main_requests(world, prompt[:2])) == requests, "the prompt is with the model")
        finally:
            runner.kill()


class Raw:
    """An agent that is talked to by hand, and killed in the end."""

    def __init__(self, world: World, name: str) -> None:
        agent = AGENTS[name]
        self.process = subprocess.Popen(
            [str(known()[agent.cli].path(world.cache)), *agent.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=world.folder,
            env=acp_environment(world) | agent.environment,
            start_new_session=True,
        )
        self._count = 0
        self.ask("initialize", protocolVersion=1, clientCapabilities={})

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self.process.stdin and self.process.stdout
        self._count += 1
        message = {"jsonrpc": "2.0", "id": self._count, "method": method, "params": params}
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer.get("id") == self._count and "method" not in answer:
                return answer
        raise AssertionError(f"it ended at {method}")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:
            self.process.wait()


async def _one_turn(name: str, root: str, cache: str) -> None:
    world = World(Path(root), Path(cache), None)  # type: ignore[arg-type]
    backend = backend_of(name, world, permissions="allow")
    async with backend.open(ConversationRequest(files=files_of(world.folder, 1))) as conversation:
        await conversation.send(sys.stdin.read())


if __name__ == "__main__":
    anyio.run(_one_turn, *sys.argv[1:4])
