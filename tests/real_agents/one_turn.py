"""One turn with an agent, in a process to be killed: `python -m tests.real_agents.one_turn KIND URL FOLDER SESSION`.

The prompt comes by standard input. FOLDER is the world's working folder; the turn's files go beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from plait.backends import ClaudeCodeBackend, CodexBackend, ConversationRequest
from plait.backends.agents.cli_agent import AgentBackend
from plait.backends.backend_protocol import Files


def make_backend(kind: str, url: str, folder: Path) -> AgentBackend:
    """The backend of that kind with the stub for a model."""
    if kind == "claude-code":
        return ClaudeCodeBackend(model="claude-sonnet-4-5", base_url=url, allowed_tools=("Bash",), cwd=folder)
    return CodexBackend(model="stub-model", base_url=f"{url}/v1", api_key_env="STUB_KEY", cwd=folder)


def files_of(folder: Path, attempt: int) -> Files:
    """The files of that attempt at a turn, beside the working folder."""
    return Files(folder.parent / "files" / "task" / str(attempt), folder.parent / "files" / "sessions")


async def _turn(kind: str, url: str, folder: str, session: str) -> None:
    backend = make_backend(kind, url, Path(folder))
    async with backend.open(
        ConversationRequest(session_id=session or None, files=files_of(Path(folder), 1))
    ) as conversation:
        await conversation.send(sys.stdin.read())


if __name__ == "__main__":
    anyio.run(_turn, *sys.argv[1:5])
