"""A run with a real agent is cancelled: how the turn ends, and what a later turn in the same session sees."""

from __future__ import annotations

import time

import anyio
import pytest

from plait import DAG, MemoryStore, ParallelRunner, RunStatus, Task
from plait.backends import ConversationRequest
from tests.real_agents.one_turn import make_backend
from tests.real_agents.world import World

NEVER = "[[until /nowhere/to/be/seen]]"


@pytest.fixture(autouse=True)
def environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


async def cancelled(world: World, kind: str, word: str, prompt: str, requests: int) -> tuple[str, float | None]:
    """Cancel a run while its agent waits for the model's answer number `requests`; the session, and the cost."""
    backend = make_backend(kind, world.stub.url, world.folder)
    sessions: list[str] = []
    runner = ParallelRunner(backend, store=MemoryStore(), cancel_grace=600)
    async with runner.start(DAG([Task("a", prompt=prompt)])) as run:
        await anyio.to_thread.run_sync(world.stub.wait_for, word, requests)
        async for event in run.events():
            if event.kind == "session_opened":
                sessions.append(event.session_id)
                break
        began = time.monotonic()
        run.cancel()
        result = await run.result()
    assert result.status is RunStatus.CANCELLED
    assert time.monotonic() - began < 15
    assert world.children == []
    return sessions[-1], result["a"].usage.cost_usd


async def said_later(world: World, kind: str, word: str, session: str) -> list[str]:
    """What the model sees in the next turn of the session."""
    backend = make_backend(kind, world.stub.url, world.folder)
    async with backend.open(ConversationRequest(session_id=session, resume=True)) as conversation:
        await conversation.send(f"{word} again")
    return [text for _, text in world.asked(word)[-1].said]


@pytest.mark.clis("claude-code")
async def test_claude_ends_its_turn_and_says_what_it_cost(world: World):
    """SIGINT in an answer: the session holds what was done and a note, and the result has the cost of the turn."""
    prompt = f"EC1 [[tool echo hi]] {NEVER}"
    session, cost = await cancelled(world, "claude-code", "EC1", prompt, 2)
    assert cost is not None and cost > 0
    said = await said_later(world, "claude-code", "EC1", session)
    assert (said[0], said[2], said[-1]) == (prompt, "<result hi>", "EC1 again")
    assert "[Request interrupted by user]" in said


@pytest.mark.clis("codex")
async def test_codex_ends_its_turn(world: World):
    """SIGINT in an answer: the thread holds what was done and a note."""
    prompt = f"EX1 [[tool echo hi]] {NEVER}"
    session, _ = await cancelled(world, "codex", "EX1", prompt, 2)
    said = await said_later(world, "codex", "EX1", session)
    assert (said[0], said[-1]) == (prompt, "EX1 again")
    assert said[2].endswith("hi>")
    assert any(text.startswith("<turn_aborted>") for text in said)
