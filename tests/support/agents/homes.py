"""Agents for tests that need none: the fake ones, where they live, and what they saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends import AcpBackend, ClaudeCodeBackend, ConversationRequest, Reply
from plait.backends.backend_protocol import Backend, Files
from plait.backends.process.process_table import PREFIX, start_time
from plait.errors import BackendError

FAKE = Path(__file__).with_name("fake_claude.py")
FAKE_ACP = Path(__file__).with_name("fake_acp.py")


@dataclass(frozen=True)
class Home:
    """A HOME of its own, in which fake agents keep their sessions and write down what they saw."""

    path: Path

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every request to the model: `session` and `said`, which is [role, text] of all messages."""
        return self.noted("calls")

    @property
    def prompts(self) -> list[str]:
        """What the user said last in each request, in order."""
        return [next(text for role, text in reversed(call["said"]) if role == "user") for call in self.calls]

    @property
    def begun(self) -> int:
        """How many answers the fake Claude Code has begun, and printed what they cost."""
        return len(self.noted("begun"))

    @property
    def processes(self) -> list[int]:
        """All that belong to some turn of agents at home here."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            is_ours = f"HOME={self.path}".encode() in variables
            if is_ours and any(one.startswith(PREFIX.encode()) for one in variables) and start_time(int(entry.name)):
                found.append(int(entry.name))
        return found

    def claude(self, **options: Any) -> ClaudeCodeBackend:
        """A backend on the fake Claude Code."""
        return ClaudeCodeBackend(command=str(self.path / "claude"), cwd=self.path, **options)

    def acp(self, *words: str, **options: Any) -> AcpBackend:
        """A backend on the fake agent that speaks ACP, started with these words."""
        return AcpBackend(command=[str(self.path / "acp"), *words], cwd=self.path, **options)

    def noted(self, name: str) -> list[Any]:
        """What the fake agents have written down under that name, in order."""
        log = self.path / f"{name}.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def files(self, attempt: int = 1, task: str = "task") -> Files:
        """Those of an attempt, as a store would give them."""
        return Files(self.path / "files" / "run" / task / str(attempt), self.path / "files" / "sessions")


def make_home(path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home at `path`, which is this process's from now on."""
    path.mkdir(parents=True, exist_ok=True)
    for name, program in (("claude", FAKE), ("acp", FAKE_ACP)):
        command = path / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {program} "$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("HOME", str(path))
    return Home(path)


async def send_opened(backend: Backend, request: ConversationRequest, prompt: str) -> Reply:
    """One turn in a conversation that is opened so."""
    async with backend.open(request) as conversation:
        return await conversation.send(prompt)


async def send(backend: Backend, prompt: str, **request: Any) -> Reply:
    """The same, by the words of the opening."""
    return await send_opened(backend, ConversationRequest(**request), prompt)


async def fails(backend: Backend, prompt: str, **request: Any) -> BackendError:
    """With what the turn fails."""
    with pytest.raises(BackendError) as caught:
        await send(backend, prompt, **request)
    return caught.value


async def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Return as soon as something is so that other processes bring about."""
    with anyio.fail_after(seconds):
        while not true():  # noqa: ASYNC110 - it is another process's doing
            await anyio.sleep(0.01)
