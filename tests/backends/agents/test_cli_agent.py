"""What all coding agents have in common that are run as a command, shown on a fake one that keeps its own sessions."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait.backends import (
    Answer,
    ClaudeCodeBackend,
    CodexBackend,
    ConversationRequest,
    Message,
    ModelOptions,
    Output,
    Reply,
)
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.usage import Usage
from tests.contracts.backend import BackendContract, Subject
from tests.support.agents.homes import Home, fails, send, send_opened, until
from tests.support.processes.warm import Warm


class TestContract(BackendContract):
    @pytest.fixture
    def subject(self, home: Home) -> Subject:
        return Subject(home.claude(), home.claude(model="hangs"), home.claude(model="fails"))


async def test_the_agent_keeps_the_history(home: Home) -> None:
    backend = home.claude()
    session = backend.new_session_id()
    known: list[str] = []
    await send(backend, "One.", session_id=session, on_session=known.append)
    reply = await send(backend, "Two.", session_id=session, resume=True)
    assert known == [session]
    assert home.calls[-1]["said"][0] == ["user", "One."]
    assert home.prompts == ["One.", "Two."]
    assert reply.messages[0] == Message("user", "Two.")
    assert reply.usage == Usage(10, 7, 0.001)


async def test_a_fork_leaves_its_parent_as_it_was(home: Home) -> None:
    backend = home.claude()
    parent, one, two = (backend.new_session_id() for _ in range(3))
    await send(backend, "Parent.", session_id=parent)
    await send(backend, "One.", session_id=one, fork_of=parent)
    await send(backend, "Two.", session_id=two, fork_of=parent)
    users = [[text for role, text in call["said"] if role == "user"] for call in home.calls]
    assert users == [["Parent."], ["Parent.", "One."], ["Parent.", "Two."]]


async def test_neither_prompt_nor_foreign_secrets_reach_argv_or_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "its own")
    monkeypatch.setenv("WANTED", "by the user")
    seen: dict[str, bytes] = {}

    def look(output: Output) -> None:
        if seen:
            return
        pid = home.calls[-1]["pid"]
        seen.update({name: Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")})
        (home.path / "go").touch()

    prompt = f"SECRET-PROMPT [[tool]] [[until {home.path / 'go'}]]"
    await send(home.claude(pass_env=("WANTED",)), prompt, on_output=look)
    assert b"SECRET-PROMPT" not in seen["cmdline"] + seen["environ"]
    assert b"hunter2" not in seen["environ"]
    assert b"its own" in seen["environ"]
    assert b"by the user" in seen["environ"]


async def test_files_of_a_turn_are_for_this_user_alone(home: Home) -> None:
    files = home.files()
    backend = home.claude(system="Be brief.", append_system="Please.")
    await send(backend, "One.", session_id=backend.new_session_id(), files=files)
    assert (files.turn / "1" / "system-prompt.txt").exists()
    found = [files.turn, *files.turn.rglob("*"), *files.sessions.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}
    assert "One." not in (files.turn / "1" / "over.json").read_text()


@pytest.mark.parametrize("prompt", ["", " \n\t"])
async def test_an_empty_prompt_is_a_mistake_and_starts_no_agent(home: Home, prompt: str) -> None:
    for backend in (home.claude(), home.acp()):
        failed = await fails(backend, prompt)
        assert failed.kind is ErrorKind.INVALID_REQUEST
        assert failed.message == f"the prompt is empty: say what {backend.kind} is to do"
    assert home.calls == []


async def test_an_answer_that_does_not_fit_is_asked_for_once_more(home: Home) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good"]}}, "required": ["mood"]}
    reply = await send(home.claude(), "Say it. [[plain]]", output_schema=schema)
    assert reply.data == {"mood": "good"}
    assert len(reply.messages) == 4
    assert [call["session"] for call in home.calls] == [reply.session_id] * 2
    assert reply.usage == Usage(20, 14, 0.002)


CUT = {
    ClaudeCodeBackend: [
        {"type": "assistant", "message": {"id": "m1", "content": [{"type": "text", "text": "I look."}]}},
        {"type": "assistant", "message": {"id": "m2", "content": [{"type": "text", "text": "half an "}]}},
        {"type": "assistant", "message": {"id": "m2", "content": [{"type": "text", "text": "ans"}]}},
        {"type": "assistant", "message": {"id": "m3", "content": [{"type": "text", "text": "no"}]}, "error": "x"},
        {"type": "result", "is_error": True, "api_error": "max_output_tokens", "result": "too long", "num_turns": 1},
    ],
    CodexBackend: [
        {"type": "thread.started", "thread_id": "t"},
        {"type": "item.completed", "item": {"type": "agent_message", "text": "I look."}},
        {"type": "item.completed", "item": {"type": "agent_message", "text": "half an ans"}},
        {"type": "turn.failed", "error": {"message": "Incomplete response returned, reason: max_output_tokens"}},
    ],
}


@pytest.mark.parametrize("kind", CUT)
async def test_the_text_of_a_cut_answer_is_kept(kind: type[ClaudeCodeBackend | CodexBackend], tmp_path: Path) -> None:
    command = tmp_path / "agent"
    told = "\n".join(map(json.dumps, CUT[kind]))
    command.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n{told}\nEND\n")
    command.chmod(0o755)
    failed = await fails(kind(command=str(command), cwd=tmp_path), "Write.")
    assert failed.kind is ErrorKind.TRUNCATED
    assert failed.messages == (Message("user", "Write."), Message("assistant", "half an ans"))


async def test_the_text_of_an_answer_cut_over_acp_is_kept(home: Home) -> None:
    failed = await fails(home.acp(), "Write. [[stop max_tokens]] [[say half an ans]]")
    assert failed.kind is ErrorKind.TRUNCATED
    assert [message.content for message in failed.messages[1:]] == ["half an ans"]
    assert failed.usage.output_tokens == 7


async def test_the_answer_after_the_end_of_background_work_is_the_answer(home: Home) -> None:
    reply = await send(home.claude(), "Build it. [[say It is being built.]] [[later It is built.]]")
    assert [message.content for message in reply.messages[1:]] == ["It is built."]
    assert reply.usage == Usage(20, 14, 0.002)


async def test_a_session_that_is_gone_is_told_again_as_text_and_the_record_says_so(home: Home) -> None:
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    notices: list[Output] = []
    backend = home.claude()
    gone = backend.new_session_id()
    reply = await send(backend, "Who?", session_id=gone, resume=True, history=history, on_output=notices.append)
    assert reply.session_id not in {None, gone}
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert gone in reply.messages[1].content
    assert gone in next(one.text for one in notices if one.kind == "notice")
    assert "My name is Ada." in home.prompts[0]
    assert home.prompts[0].endswith("Who?")


@pytest.mark.parametrize("on_lost_session", ["replay", "fail"])
async def test_a_conversation_with_another_backend_is_told_as_text(home: Home, on_lost_session: str) -> None:
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    backend = home.claude(on_lost_session=on_lost_session)
    session = backend.new_session_id()
    reply = await send(backend, "Who?", session_id=session, history=history)
    assert reply.session_id == session
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert reply.messages[0].content == "Who?"
    assert "My name is Ada." in home.prompts[0]
    assert home.prompts[0].endswith("Who?")
    await send(backend, "Again?", session_id=session, resume=True, history=(*history, *reply.messages))
    assert home.prompts[1] == "Again?"


async def test_a_session_that_is_gone_fails_where_that_is_wished(home: Home) -> None:
    backend = home.claude(on_lost_session="fail")
    with pytest.raises(BackendError) as caught:
        await send(backend, "Who?", session_id="x", resume=True, history=(Message("user", "Ada"),))
    assert caught.value.kind is ErrorKind.SESSION_LOST
    assert home.calls == []


async def test_a_turn_that_fails_says_so_whatever_the_exit_status(home: Home) -> None:
    with pytest.raises(BackendError) as caught:
        await send(home.claude(), "One. [[error 429]]")
    assert caught.value.kind is ErrorKind.RATE_LIMITED
    with pytest.raises(BackendError) as caught:
        await send(home.claude(), "One. [[die]]")
    assert caught.value.kind is ErrorKind.CRASHED
    assert "SIGKILL" in caught.value.message


async def test_a_cut_turn_is_taken_up_behind_its_last_whole_message_and_is_paid_for_once(home: Home) -> None:
    backend = home.claude()
    session = backend.new_session_id()
    working = ConversationRequest(session_id=session, files=home.files(1))
    async with anyio.create_task_group() as group:
        group.start_soon(send_opened, backend, working, "Work. [[tool]] [[until /dev/null/never]]")
        await until(lambda: home.begun == 2)  # the tool's result is there, and the model is asked again
        group.cancel_scope.cancel()
    left = backend.inspect(home.files(1))
    assert left is not None
    assert (left.state, left.session_id) == ("dead", session)
    reply = await send(
        backend, "Go on.", session_id=session, resume=True, resumes_interrupted=True, files=home.files(2)
    )
    assert home.prompts[-1] == "Go on."
    said = [text for _, text in home.calls[-1]["said"]]
    assert said == ["Work. [[tool]] [[until /dev/null/never]]", "<tool Bash>", "<result done>", "Go on."]
    assert reply.usage.input_tokens == 30  # three requests, two of them in the turn that was cut


async def test_a_turn_that_was_cut_before_its_last_message_was_kept_goes_on_from_what_was(home: Home) -> None:
    backend = home.claude()
    session = backend.new_session_id()
    working = ConversationRequest(session_id=session, files=home.files(1))
    async with anyio.create_task_group() as group:
        group.start_soon(send_opened, backend, working, "Work. [[tool]] [[until /dev/null/never]]")
        await until(lambda: home.begun == 2)
        group.cancel_scope.cancel()
    # The real one writes its file a moment after it has told what stands in it.
    kept = home.path / "sessions" / f"{session}.jsonl"
    kept.write_text("".join(kept.read_text().splitlines(keepends=True)[:-1]))
    reply = await send(
        backend, "Go on.", session_id=session, resume=True, resumes_interrupted=True, files=home.files(2)
    )
    assert [text for _, text in home.calls[-1]["said"]] == [
        "Work. [[tool]] [[until /dev/null/never]]",
        "<tool Bash>",
        "Go on.",
    ]
    assert len(home.calls) == 3
    assert reply.session_id == session
    assert reply.usage.input_tokens == 30


async def test_a_cut_turn_whose_session_is_gone_is_said_to_be_lost(home: Home) -> None:
    backend = home.claude()
    session = backend.new_session_id()
    working = ConversationRequest(session_id=session, files=home.files(1))
    async with anyio.create_task_group() as group:
        group.start_soon(send_opened, backend, working, "Work. [[tool]] [[until /dev/null/never]]")
        await until(lambda: home.begun == 2)
        group.cancel_scope.cancel()
    (home.path / "sessions" / f"{session}.jsonl").unlink()
    with pytest.raises(BackendError, match="No conversation found") as caught:
        await send(backend, "Go on.", session_id=session, resume=True, resumes_interrupted=True, files=home.files(2))
    assert caught.value.kind is ErrorKind.SESSION_LOST
    assert len(home.calls) == 2


async def test_a_person_is_asked_and_the_answer_reaches_that_use(home: Home) -> None:
    backend = home.claude(ask_for=("Bash",))
    session = backend.new_session_id()
    asked = await send(backend, "Clean up. [[ask]]", session_id=session)
    assert asked.question is not None
    assert "rm -r build" in asked.question.text
    answer = Answer("deny: not that one")
    reply = await send(backend, "deny: not that one", session_id=session, resume=True, answer=answer)
    assert reply.question is None
    assert reply.text == "went on"
    assert home.prompts[-1] == "<result deny not that one>"


PARENT = """
import anyio, sys
from plait.backends import ConversationRequest
from tests.support.agents.homes import Home
from pathlib import Path

async def main(home, sessions):
    backend = home.claude(on_runner_death=sys.argv[2])
    async def one(task, session):
        opening = ConversationRequest(session_id=session, files=home.files(1, task))
        async with backend.open(opening) as conversation:
            await conversation.send(f"{task} [[until {home.path}/go]]")
    async with anyio.create_task_group() as group:
        for task, session in sessions:
            group.start_soon(one, task, session)

anyio.run(main, Home(Path(sys.argv[1])), [part.split("=") for part in sys.argv[3:]])
"""


async def _die_with_turns_at_work(home: Home, on_death: str, turns: dict[str, str]) -> None:
    """A process that runs these turns, killed when all of their prompts are with the model."""
    words = [f"{task}={session}" for task, session in turns.items()]
    parent = Warm([sys.executable, "-c", PARENT, str(home.path), on_death, *words])
    await until(lambda: home.begun == len(turns))
    parent.kill()
    parent.wait()


async def test_turns_outlive_their_runner_and_are_adopted(home: Home) -> None:
    backend = home.claude()
    turns = {f"task{n}": str(backend.new_session_id()) for n in range(4)}
    await _die_with_turns_at_work(home, "adopt", turns)
    for task, session in turns.items():
        left = backend.inspect(home.files(1, task))
        assert left is not None
        assert (left.state, left.session_id) == ("alive", session)
        assert home.acp().inspect(home.files(1, task)) is None, "it is not the turn of an agent of this kind"
    replies: dict[str, Reply] = {}

    async def adopt(task: str, session: str) -> None:
        request = ConversationRequest(session_id=session, files=home.files(1, task), attaches=True)
        replies[task] = await send_opened(backend, request, f"{task} [[until {home.path}/go]]")

    async with anyio.create_task_group() as group:
        for task, session in turns.items():
            group.start_soon(adopt, task, session)
        (home.path / "go").touch()
    assert {task: reply.session_id for task, reply in replies.items()} == turns
    assert all(reply.text.startswith("answer 1 to: task") for reply in replies.values())
    assert len(home.calls) == 4


async def test_a_turn_that_ended_meanwhile_is_collected(home: Home) -> None:
    backend = home.claude()
    session = str(backend.new_session_id())
    await _die_with_turns_at_work(home, "adopt", {"task": session})
    (home.path / "go").touch()
    await until(lambda: _state(home) == "ended")
    request = ConversationRequest(session_id=session, files=home.files(1), attaches=True)
    reply = await send_opened(backend, request, "the same prompt")
    assert reply.text.startswith("answer 1 to: task")
    assert len(home.calls) == 1


async def test_turns_that_are_to_die_with_their_runner_do(home: Home) -> None:
    backend = home.claude()
    await _die_with_turns_at_work(home, "kill", {"task": str(backend.new_session_id())})
    assert _state(home) == "dead"  # at once: nobody is to take it over in its last moments
    await until(lambda: not home.processes)


def _state(home: Home) -> str:
    left = home.claude().inspect(home.files(1))
    return "" if left is None else left.state


async def test_what_is_missing_is_said_with_the_way_to_get_it(home: Home) -> None:
    with pytest.raises(BackendUnavailable, match="npm install -g @anthropic-ai/claude-code"):
        ClaudeCodeBackend(command="no-such-claude").check()
    with pytest.raises(BackendUnavailable, match="cwd"):
        ClaudeCodeBackend(command=str(home.path / "claude"), cwd=home.path / "nowhere").check()


@pytest.mark.parametrize("kind", [ClaudeCodeBackend, CodexBackend])
def test_a_url_with_a_password_is_refused_and_not_shown(
    kind: type[ClaudeCodeBackend] | type[CodexBackend],
) -> None:
    with pytest.raises(ValueError, match="put the key in the environment variable") as refused:
        kind(base_url="http://me:hunter2@127.0.0.1:9/v1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("cwd", [None, "below"])
async def test_a_working_directory_that_was_removed_is_one_line(
    cwd: str | None, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = replace(home.claude(), cwd=cwd)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(BackendUnavailable, match="working directory of this process has been removed; name another"):
        await send(backend, "One.")


async def test_a_task_has_a_model_of_its_own(home: Home) -> None:
    with pytest.raises(BackendError):
        await send(home.claude(), "One.", options=ModelOptions(model="fails"))
    assert (await send(home.claude(model="fails"), "One.", options=ModelOptions(model="fine"))).text


async def test_a_task_has_a_system_prompt_of_its_own(home: Home) -> None:
    seen: list[str] = []

    def look(_output: Output) -> None:
        if not seen:
            seen.append(Path(f"/proc/{home.calls[-1]['pid']}/cmdline").read_text())
            (home.path / "go").touch()

    prompt = f"[[tool]] [[until {home.path / 'go'}]]"
    await send(home.claude(system="Be brief."), prompt, on_output=look, options=ModelOptions(system="Be long."))
    assert "--system-prompt-file=" in seen[0]
