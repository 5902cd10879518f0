"""What our backends rely on about sessions that no event tells: when they are safe, and when a turn is really over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest

from plait.backends import ConversationRequest, Reply
from plait.backends.agents.cli_agent import AgentBackend
from plait.errors import BackendError, ErrorKind
from tests.real_agents.one_turn import files_of, make_backend
from tests.real_agents.world import World, until


@pytest.fixture(autouse=True)
def environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)


async def send(backend: AgentBackend, prompt: str, **request: object) -> Reply:
    async with backend.open(ConversationRequest(**request)) as conversation:  # type: ignore[arg-type]
        return await conversation.send(prompt)


def let_read(fifo: Path) -> bool:
    """Let whoever reads from `fifo` come to its end; return whether somebody does."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def wrote(folder: Path, word: str) -> bool:
    """Return whether a command that Claude Code runs in the background wrote `word`."""
    return any(word in output.read_text() for output in folder.rglob("tasks/*.output"))


@pytest.mark.clis("claude-code")
@pytest.mark.parametrize("awaited", ["result", "task_notification"])
async def test_what_claude_does_in_the_background_is_waited_for(world: World, awaited: str):
    """A `result` is not the last one while a command works in the background, nor if the command has ended before it:
    the model is told of the end, and answers again.
    """
    backend = make_backend("claude-code", world.stub.url, world.folder)
    go, files = world.root / "go", files_of(world.folder, 1)
    # The command ends after the first result, or the first result comes after its end.
    command, gate = "echo SEEN", f"[[until {go}]]"
    if awaited == "result":
        os.mkfifo(go)
        command, gate = f"cat {go}; {command}", ""
    given = json.dumps({"command": command, "description": "waits", "run_in_background": True})
    replies: list[Reply] = []

    async def turn() -> None:
        request = {"session_id": backend.new_session_id(), "files": files}
        replies.append(await send(backend, f"B [[tool-named Bash {given}]]{gate}", **request))

    output = files.turn / "1" / "stdout"

    def let_end() -> None:
        until(lambda: output.exists() and f'"{awaited}"' in output.read_text(), awaited)
        if awaited == "result":
            until(lambda: let_read(go), "a command that waits")
            until(lambda: wrote(files.turn, "SEEN"), "the command's end")
        else:
            go.touch()

    with anyio.fail_after(90):
        async with anyio.create_task_group() as group:
            group.start_soon(turn)
            await anyio.to_thread.run_sync(let_end)
    requests = world.stub.requests()
    assert len(requests) == 3
    assert replies[0].usage.output_tokens == sum(one.usage["output"] for one in requests if one.usage)
    assert world.children == []


def die_after_a_tool(world: World, prompt: str, session: str, late: bool) -> None:
    """Runner and agent are killed once the agent has told of a tool's result and its session has a file, or, late, once
    that has the result, too.
    """
    output = files_of(world.folder, 1).turn / "1" / "stdout"
    awaited = '"tool_result"' if late else ""
    argv = [
        sys.executable,
        "-m",
        "tests.real_agents.one_turn",
        "claude-code",
        world.stub.url,
        str(world.folder),
        session,
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2]) as runner:
        assert runner.stdin
        runner.stdin.write(prompt.encode())
        runner.stdin.close()
        until(lambda: output.exists() and '"tool_result"' in output.read_text(), "the tool's result")
        kept = partial((world.home / ".claude").glob, f"projects/*/{session}.jsonl")
        until(lambda: any(awaited in file.read_text() for file in kept()), f"{awaited} in the session's file")
        for pid in (runner.pid, *world.children):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.clis("claude-code")
@pytest.mark.parametrize("late", [False, True])
async def test_a_turn_of_claudes_that_is_cut_right_after_a_tool_goes_on(world: World, late: bool):
    """What it tells of a tool's result it writes down a moment later; whether it did or not, the session goes on."""
    backend = make_backend("claude-code", world.stub.url, world.folder)
    session = backend.new_session_id()
    prompt = "W [[tool echo hi]] [[until /nowhere/to/be/seen]]"
    assert session
    die_after_a_tool(world, prompt, session, late)
    until(lambda: (left := backend.inspect(files_of(world.folder, 1))) and left.state == "dead", "its death")
    request = {"session_id": session, "resume": True, "resumes_interrupted": True}
    request |= {"files": files_of(world.folder, 2)}
    reply = await send(backend, "Go on.", **request)
    assert reply.session_id == session
    last = world.stub.requests()[-1]
    assert (last.prompts[0], last.prompts[-1]) == (prompt, "Go on.")
    assert last.prompts.count(prompt) == 1


@pytest.mark.clis("codex")
async def test_codex_takes_what_is_no_uuid_for_a_new_session(world: World):
    """A session id that is no UUID and that it does not know begins a new session, and is answered there."""
    backend = make_backend("codex", world.stub.url, world.folder)
    with pytest.raises(BackendError) as caught:
        await send(backend, "Who am I?", session_id="no-such-thing", resume=True)
    assert caught.value.kind is ErrorKind.SESSION_LOST
    assert "started another session" in caught.value.message
