"""AcpBackend with the real agents that ask for permission: what a rule or a person tells them, what they do then."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends import Answer, Output
from plait.backends.agents.acp_machine import PermissionPolicy
from plait.errors import BackendError, ErrorKind
from tests.real_agents.acp_agents import AGENTS, agents, backend_of, counted, main_requests, send, tokens
from tests.real_agents.one_turn import files_of
from tests.real_agents.world import World

pytestmark = pytest.mark.usefixtures("acp_environment")


@agents("goose", "claude-agent-acp", "gemini")
async def test_who_is_denied_goes_on_without(world: World, name: str):
    """It asks before it uses its shell, heeds that it may not, and goes on."""
    made, outputs = await turn(world, name, "deny")
    assert not made.exists()
    assert any(one.kind == "notice" for one in outputs)


@agents("goose", "gemini")
async def test_who_is_allowed_does_it(world: World, name: str):
    """It asks before it uses its shell, and uses it once it may."""
    made, outputs = await turn(world, name, "allow")
    assert made.exists()
    assert not any(one.kind == "notice" for one in outputs)


async def turn(world: World, name: str, permissions: PermissionPolicy) -> tuple[Path, list[Output]]:
    """The file that is to be made in a turn, and what was seen of the turn."""
    made, outputs = world.folder / "made", list[Output]()
    prompt = f"P1 [[tool touch {made}]] [[say done]]"
    reply = await send(backend_of(name, world, permissions=permissions), prompt, on_output=outputs.append)
    assert reply.text == "done"
    assert tokens(reply.usage) == counted(name, main_requests(world, "P1"))
    assert any(str(made) in one.text for one in outputs if one.kind == "tool")
    return made, outputs


@agents("qwen", "opencode")
async def test_who_is_denied_and_gives_up_has_no_answer(world: World, name: str):
    """A rejection ends the turn without a word."""
    made = world.folder / "made"
    with pytest.raises(BackendError) as caught:
        await send(backend_of(name, world), f"P1 [[tool touch {made}]] [[say done]]")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert "denied action" in caught.value.message
    assert not made.exists()


@agents("goose", "claude-agent-acp", "gemini", "qwen", "opencode")
async def test_a_person_is_asked_and_the_answer_reaches_that_very_deed(world: World, name: str):
    """Stopped when it asks, it hears of the answer in another process, asks again, and may."""
    made = world.folder / "made"
    backend, allow = backend_of(name, world, permissions="ask"), AGENTS[name].allow
    prompt = f"Q1 [[tool touch {made}]]"
    asked = await send(backend, prompt, files=files_of(world.folder, 1))
    assert asked.question is not None and asked.question.schema is not None
    assert allow in asked.question.schema["enum"]  # type: ignore[operator]
    assert str(made) in asked.question.text
    assert not made.exists()
    reply = await send(
        backend,
        f"{allow} [[tool touch {made}]] [[say thanks]]",
        files=files_of(world.folder, 2),
        history=asked.turn(prompt),
        session_id=asked.session_id,
        resume=True,
        answer=Answer(allow),
    )
    assert (reply.question, reply.text) == (None, "thanks")
    assert made.exists()
