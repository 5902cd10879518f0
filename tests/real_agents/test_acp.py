"""AcpBackend with the real agents that speak ACP: what the model saw, what was done, and what plait says it cost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import anyio
import pytest

from plait.backends import AcpBackend, Message, Reply
from plait.errors import BackendError, ErrorKind
from tests.real_agents.acp_agents import (
    AGENTS,
    NEVER,
    QUICK,
    Raw,
    agents,
    backend_of,
    counted,
    die,
    main_requests,
    send,
    tokens,
)
from tests.real_agents.one_turn import files_of
from tests.real_agents.world import Json, World, until
from tests.support.sizes import size

pytestmark = pytest.mark.usefixtures("acp_environment")
GONE = "01a2000a-1ecc-7a20-bc14-49e1445f179f"


@agents(*QUICK)
async def test_a_conversation(world: World, name: str):
    """A session is gone on with in another process, also after another one was branched off; turns cost their own."""
    backend = backend_of(name, world, permissions="allow")
    first = await send(backend, "B1 [[say one]]", files=files_of(world.folder, 1))
    if backend.can_fork:
        await branch_off(backend, world, first)
    going_on = {"session_id": first.session_id, "resume": True, "files": files_of(world.folder, 3)}
    second = await send(backend, "B2 [[tool echo hi]] [[say two]]", **going_on)
    assert (first.text, second.text, second.session_id) == ("one", "two", first.session_id)
    requests = main_requests(world, "B2")
    assert requests[-1].prompts == ["B1 [[say one]]", "B2 [[tool echo hi]] [[say two]]"]
    assert tokens(first.usage) == counted(name, main_requests(world, "B1"))
    assert tokens(second.usage) == counted(name, requests)


async def branch_off(backend: AcpBackend, world: World, parent: Reply) -> None:
    fork = await send(backend, "F1", fork_of=parent.session_id, files=files_of(world.folder, 2))
    assert fork.session_id not in {None, parent.session_id}
    assert main_requests(world, "F1")[-1].prompts == ["B1 [[say one]]", "F1"]


@agents("opencode")
async def test_a_branch(world: World, name: str):
    """A session is branched off."""
    backend = backend_of(name, world)
    first = await send(backend, "B1 [[say one]]", files=files_of(world.folder, 1))
    assert tokens(first.usage) == counted(name, main_requests(world, "B1"))
    await branch_off(backend, world, first)


@agents(*QUICK, "opencode", "qwen")
async def test_a_session_that_is_gone(world: World, name: str):
    """A session that it does not know is told as what it is, before the model is asked."""
    with pytest.raises(BackendError) as caught:
        await send(backend_of(name, world, on_lost_session="fail"), "Who?", session_id=GONE, resume=True)
    assert caught.value.kind is ErrorKind.SESSION_LOST, caught.value
    assert main_requests(world, "Who?") == []


@agents(*QUICK)
@pytest.mark.parametrize(
    ("status", "expected"),
    # Of what kind each answer is: tests/backends/agents/test_acp_failures.py.
    [(429, ErrorKind.RATE_LIMITED), *size([], [(401, ErrorKind.AUTH), (400, ErrorKind.INVALID_REQUEST)])],
)
async def test_errors(world: World, name: str, status: int, expected: ErrorKind):
    """What the model's server refuses is an error of its kind, whatever the agent calls it."""
    with pytest.raises(BackendError) as caught:
        await send(backend_of(name, world), f"E [[error {status}]]")
    assert caught.value.kind is expected, caught.value
    if status == 429:
        assert len(main_requests(world, "E")) == AGENTS[name].tries


@agents(*QUICK, "gemini")
async def test_the_runner_dies_and_the_turn_goes_on(world: World, name: str):
    """Another process goes on talking to the same agent."""
    backend, go = backend_of(name, world, permissions="allow"), world.root / "go"
    die(name, world, f"D1 [[until {go}]] [[say still here]]")
    left = backend.inspect(files_of(world.folder, 1))
    assert left is not None and left.state == "alive" and left.session_id
    go.touch()
    reply = await send(backend, "D1", attaches=True, files=files_of(world.folder, 1))
    assert (reply.text, reply.session_id) == ("still here", left.session_id)
    assert len(main_requests(world, "D1")) == 1
    assert world.children == []


@agents(*QUICK, "qwen", "opencode")
async def test_both_die_and_the_prompt_is_sent_once(world: World, name: str):
    """After SIGKILL the session has the prompt, and is gone on with; what is known of the cut turn's cost is paid."""
    backend = backend_of(name, world, permissions="allow")
    die(name, world, f"D3 [[tool echo hi]] {NEVER}", requests=2)
    for pid in world.children:
        with suppress(ProcessLookupError):  # some end with the one before
            os.kill(pid, signal.SIGKILL)
    until(lambda: (left := backend.inspect(files_of(world.folder, 1))) and left.state == "dead", "its death")
    left = backend.inspect(files_of(world.folder, 1))
    assert left is not None and left.session_id is not None
    request = {
        "session_id": left.session_id,
        "resume": True,
        "resumes_interrupted": True,
        "files": files_of(world.folder, 2),
    }
    reply = await send(backend, "You were interrupted; go on. [[say went on]]", **request)
    assert reply.text == "went on"
    requests = main_requests(world, "You were interrupted")
    assert "\n".join(requests[-1].prompts).count("D3") == 1, requests[-1].prompts
    cut = main_requests(world, "D3") if AGENTS[name].as_it_goes else []
    assert tokens(reply.usage) == counted(name, [*cut, *requests])


@agents(*QUICK)
async def test_a_cancelled_turn_leaves_nothing(world: World, name: str):
    """Cancelled in the middle of a turn."""
    backend = backend_of(name, world)
    async with anyio.create_task_group() as group:
        group.start_soon(send, backend, f"C1 {NEVER}")
        await anyio.to_thread.run_sync(lambda: until(lambda: main_requests(world, "C1"), "the prompt"))
        group.cancel_scope.cancel()
    assert world.children == []


@agents("opencode")
async def test_a_path_at_the_beginning(world: World, name: str):
    """opencode takes a prompt that begins with a slash for a command that it does not know, and says nothing."""
    with pytest.raises(BackendError, match="begin the prompt with another character than a slash") as caught:
        await send(backend_of(name, world), "/home/ada/notes.txt [[say read]]")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert (await send(backend_of(name, world), "Look: /home/ada/notes.txt [[say read]]")).text == "read"


@agents("gemini")
async def test_gemini_loses_a_session_that_it_has_loaded(world: World, name: str):
    """A session that was loaded once is not there the next time, if it is at all: so it is told as text instead."""
    first = await send(backend_of(name, world), "L1", files=files_of(world.folder, 1))
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello."))
    going_on = {"session_id": first.session_id, "resume": True, "history": history}
    reply = await send(backend_of(name, world), "L2", files=files_of(world.folder, 2), **going_on)
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert reply.session_id not in {None, first.session_id}
    assert "My name is Ada." in world.stub.requests()[-1].prompts[-1]
    answers: list[Json] = []
    for _ in range(2):
        with Raw(world, name) as agent:
            place = {"cwd": str(world.folder), "mcpServers": []}
            answers.append(agent.ask("session/load", sessionId=first.session_id, **place))
    assert "error" in answers[1], answers


@agents(*QUICK)
async def test_it_ends_with_its_input(world: World, name: str):
    """Nobody has to end it who does not come back."""
    with Raw(world, name) as agent:
        assert agent.process.stdin
        agent.process.stdin.close()
        assert agent.process.wait(30) == 0
