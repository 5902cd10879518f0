"""plait's own backends with the real commands: what the model saw, and what plait says that it cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from plait.backends import ConversationRequest, Message, Reply
from plait.backends.agents.cli_agent import AgentBackend
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage
from tests.real_agents.one_turn import files_of, make_backend
from tests.real_agents.stub import Request
from tests.real_agents.world import World, until
from tests.support.sizes import size

CLAUDE = pytest.param("claude-code", marks=pytest.mark.clis("claude-code"))
CODEX = pytest.param("codex", marks=pytest.mark.clis("codex"))
ALL = pytest.mark.parametrize("kind", [CLAUDE, CODEX])
NEVER = "[[until /nowhere/to/be/seen]]"


@pytest.fixture(autouse=True)
def environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


def backend_of(kind: str, world: World) -> AgentBackend:
    return make_backend(kind, world.stub.url, world.folder)


async def send(backend: AgentBackend, prompt: str, **request: object) -> Reply:
    async with backend.open(ConversationRequest(**request)) as conversation:  # type: ignore[arg-type]
        return await conversation.send(prompt)


def counted(kind: str, requests: list[Request]) -> Usage:
    """What those requests cost by the stub's own count; Anthropic's protocol counts what was cached beside the rest."""
    known = [one.usage for one in requests if one.usage]
    cached = sum(one["cached"] for one in known) if kind == "claude-code" else 0
    return Usage(sum(one["input"] for one in known) + cached, sum(one["output"] for one in known))


def tokens(usage: Usage) -> Usage:
    return Usage(usage.input_tokens, usage.output_tokens)


@ALL
async def test_a_conversation(world: World, kind: str):
    backend = backend_of(kind, world)
    first = await send(backend, "B1 [[say one]]", session_id=backend.new_session_id(), files=files_of(world.folder, 1))
    request = {"session_id": first.session_id, "resume": True, "files": files_of(world.folder, 2)}
    second = await send(backend, "B2 [[tool echo hi]] [[say two]]", **request)
    assert (first.text, second.text, second.session_id) == ("one", "two", first.session_id)
    requests = world.stub.requests()
    assert requests[-1].prompts == ["B1 [[say one]]", "B2 [[tool echo hi]] [[say two]]"]
    assert len(requests) == 3
    assert [tokens(one.usage) for one in (first, second)] == [
        counted(kind, requests[:1]),
        counted(kind, requests[1:]),
    ]
    assert [one.usage.model for one in (first, second)] == [requests[0].model, requests[-1].model]


@ALL
async def test_forks(world: World, kind: str):
    backend = backend_of(kind, world)
    parent = await send(backend, "F1", session_id=backend.new_session_id(), files=files_of(world.folder, 1))
    for number, prompt in ((2, "F2"), (3, "F3")):
        request = {"session_id": backend.new_session_id(), "fork_of": parent.session_id}
        fork = await send(backend, prompt, **request, files=files_of(world.folder, number))
        assert fork.session_id not in {None, parent.session_id}
        assert tokens(fork.usage) == counted(kind, world.asked(prompt))
        assert world.asked(prompt)[-1].prompts == ["F1", prompt]


@ALL
@pytest.mark.parametrize(
    ("status", "expected"),
    # What the agents say of each status: test_facts_*.py. Of what kind that is: tests/backends/agents.
    [
        (429, ErrorKind.RATE_LIMITED),
        *size([], [(401, ErrorKind.AUTH), (500, ErrorKind.TRANSIENT), (503, ErrorKind.OVERLOADED)]),
    ],
)
async def test_errors(world: World, kind: str, status: int, expected: ErrorKind):
    backend = backend_of(kind, world)
    with pytest.raises(BackendError) as caught:
        await send(backend, f"E [[error {status}]]", session_id=backend.new_session_id())
    assert caught.value.kind is expected, caught.value
    assert len(world.asked("E")) == 1


@ALL
async def test_a_prompt_that_is_a_command(world: World, kind: str):
    """Claude Code takes it for one, and what it says then is no answer; to the others it is a prompt like all."""
    if kind != "claude-code":
        assert "/clear" in (await send(backend_of(kind, world), "/clear")).text
        return
    with pytest.raises(BackendError, match="took the prompt for a command of its own") as caught:
        await send(backend_of(kind, world), "/clear")
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


@ALL
async def test_a_session_that_is_gone(world: World, kind: str):
    backend = backend_of(kind, world)
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    gone = "01a2000a-1ecc-7a20-bc14-49e1445f179f"
    reply = await send(backend, "Who?", session_id=gone, resume=True, history=history)
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert reply.session_id not in {None, gone}
    (request,) = world.stub.requests()
    assert "My name is Ada." in request.prompts[-1]


def die(kind: str, world: World, prompt: str, session: str | None, requests: int = 1) -> None:
    """A runner has a turn, and is killed in the middle of it."""
    argv = [sys.executable, "-m", "tests.real_agents.one_turn", kind, world.stub.url, str(world.folder), session or ""]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdin
        runner.stdin.write(prompt.encode())
        runner.stdin.close()
        world.stub.wait_for(prompt[:2], requests)
        runner.kill()


@ALL
async def test_the_runner_dies_and_the_turn_goes_on(world: World, kind: str):
    backend, go = backend_of(kind, world), world.root / "go"
    session = backend.new_session_id()
    die(kind, world, f"D1 [[until {go}]] [[say still here]]", session)
    left = backend.inspect(files_of(world.folder, 1))
    assert left is not None and left.state == "alive"
    go.touch()
    request = {"session_id": session or left.session_id, "attaches": True, "files": files_of(world.folder, 1)}
    reply = await send(backend, "D1", **request)
    assert reply.text == "still here"
    assert tokens(reply.usage) == counted(kind, world.stub.requests())
    assert len(world.stub.requests()) == 1


@ALL
async def test_the_runner_dies_and_the_turn_ends_meanwhile(world: World, kind: str):
    backend, go = backend_of(kind, world), world.root / "go"
    session = backend.new_session_id()
    die(kind, world, f"D2 [[until {go}]] [[say done]]", session)
    go.touch()
    until(lambda: (left := backend.inspect(files_of(world.folder, 1))) and left.state == "ended", "the turn's end")
    request = {"session_id": session, "attaches": True, "files": files_of(world.folder, 1)}
    assert (await send(backend, "D2", **request)).text == "done"
    assert len(world.stub.requests()) == 1


@ALL
async def test_both_die_and_the_prompt_is_sent_once(world: World, kind: str):
    backend = backend_of(kind, world)
    session = backend.new_session_id()
    prompt = f"D3 [[tool echo hi]] {NEVER}"
    die(kind, world, prompt, session, requests=2)
    for pid in world.children:
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
    reply = await send(backend, "You were interrupted; go on.", **request)
    assert reply.text.startswith("STUB")
    last = world.stub.requests()[-1]
    assert last.prompts == [prompt, "You were interrupted; go on."]


@ALL
async def test_a_cancelled_turn_leaves_nothing(world: World, kind: str):
    backend = backend_of(kind, world)
    async with anyio.create_task_group() as group:
        group.start_soon(send, backend, f"C1 {NEVER}")
        await anyio.to_thread.run_sync(world.stub.wait_for, "C1")
        group.cancel_scope.cancel()
    assert world.children == []


@ALL
async def test_an_answer_in_a_schema(world: World, kind: str):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    backend = backend_of(kind, world)
    reply = await send(backend, 'J [[json {"a": 1}]]', session_id=backend.new_session_id(), output_schema=schema)
    assert reply.data == {"a": 1}
    assert tokens(reply.usage) == counted(kind, world.stub.requests())


@ALL
async def test_a_branch_off_from_a_session_whose_file_is_gone(world: World, kind: str):
    backend = backend_of(kind, world)
    parent = await send(backend, "P1", session_id=backend.new_session_id(), files=files_of(world.folder, 1))
    assert parent.session_id is not None
    for file in backend.session_files(parent.session_id):
        file.unlink()
    request = {"session_id": backend.new_session_id(), "fork_of": parent.session_id, "files": files_of(world.folder, 2)}
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    reply = await send(backend, "Who?", history=history, **request)
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert "My name is Ada." in world.asked("Who?")[-1].prompts[-1]
