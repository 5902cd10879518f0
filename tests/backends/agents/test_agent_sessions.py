"""A session has one writer at a time: others wait, and are told what was said when that takes too long."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait.backends import ConversationRequest, Output
from plait.backends.agents import cli_agent
from plait.backends.agents.cli_agent import Sessions, marked, remove_sessions_except, unmarked
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage
from tests.support.agents.homes import Home, send, send_opened, until


async def test_two_writers_of_one_session_go_one_after_the_other(home: Home) -> None:
    backend = home.claude()
    session = backend.new_session_id()
    await send(backend, "First.", session_id=session, files=home.files(1))
    waits: list[Output] = []

    def note(output: Output) -> None:
        waits.append(output)
        (home.path / "go").touch()

    async with anyio.create_task_group() as group:
        prompt = f"Long. [[until {home.path / 'go'}]]"
        slow = ConversationRequest(session_id=session, resume=True, files=home.files(2, "a"))
        group.start_soon(send_opened, backend, slow, prompt)
        await until(lambda: len(home.calls) == 2)
        await send(backend, "Short.", session_id=session, resume=True, files=home.files(3, "b"), on_output=note)
    assert waits[0].kind == "waiting"
    assert session in waits[0].text
    users = [text for role, text in home.calls[-1]["said"] if role == "user"]
    assert users == ["First.", prompt, "Short."]


@pytest.mark.parametrize("on_lost", ["replay", "fail"])
async def test_a_session_that_somebody_else_keeps_is_told_as_text_elsewhere(
    home: Home, monkeypatch: pytest.MonkeyPatch, on_lost: Any
) -> None:
    monkeypatch.setattr(cli_agent, "_PATIENCE", 0.1)
    backend = home.claude(on_lost_session=on_lost)
    session = backend.new_session_id()
    said = (await send(backend, "First.", session_id=session, files=home.files(1))).messages
    with subprocess.Popen([sys.executable, "-c", KEEPER, *_locks(home)], stdout=-1, stdin=-1) as keeper:  # noqa: ASYNC220
        assert keeper.stdout is not None and keeper.stdout.readline()
        later = partial(send, backend, "And?", session_id=session, resume=True, history=said, files=home.files(2))
        if on_lost == "fail":
            with pytest.raises(BackendError, match=rf"session {session} is in use by process .*; wait until") as caught:
                await later()
            assert caught.value.kind is ErrorKind.TRANSIENT
        else:
            reply = await later()
            assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
            assert f"session {session} could not be continued" in reply.messages[1].content
            assert reply.session_id not in {None, session}
            assert "First." in home.prompts[-1]
        keeper.kill()


def test_a_session_id_with_an_open_question() -> None:
    for question in ("asks-0123456789abcdef", "spent-2.030000-of-2.000000"):
        assert unmarked(marked("a?b\n", question)) == ("a?b\n", question)
    assert unmarked("a?spent-1-of-2") == ("a?spent-1-of-2", "")
    assert unmarked(None) == (None, "")


def test_the_files_of_a_session_with_an_open_question_stay(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, "agent")
    for session_id in ("waits", "gone"):
        sessions.note_spent(session_id, Usage(1))
    assert remove_sessions_except([marked("waits", "asks-0123456789abcdef")], tmp_path, -1.0) == []
    assert (sessions.spent("waits"), sessions.spent("gone")) == (Usage(1), None)


KEEPER = """
import fcntl, sys
kept = [open(path) for path in sys.argv[1:]]
for file in kept:
    fcntl.flock(file, fcntl.LOCK_EX)
print("kept", flush=True)
sys.stdin.read()
"""


def _locks(home: Home) -> list[str]:
    return [str(path) for path in home.files().sessions.glob("*.lock")]


@pytest.mark.parametrize("lock", ["/dev/full", "/dev/null/lock"])
async def test_a_lock_that_cannot_be_written_may_be_written_later(tmp_path: Path, lock: str) -> None:
    name = hashlib.sha256(b"s").hexdigest()[:32]
    (tmp_path / f"agent-{name}.lock").symlink_to(lock)
    with pytest.raises(BackendError, match=r"the session cannot be locked, because .* cannot be written: ") as caught:
        async with Sessions(tmp_path, "agent").writing("s", 1.0, print):
            raise AssertionError("the lock is held")
    assert caught.value.kind is ErrorKind.TRANSIENT
