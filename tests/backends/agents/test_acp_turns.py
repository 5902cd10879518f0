"""Turns with an agent that speaks ACP, shown on a fake one that keeps its own sessions."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from plait.backends import AcpBackend, Message, Output, Usage
from plait.errors import BackendError, ErrorKind
from tests.contracts.backend import BackendContract, Subject
from tests.support.agents.homes import Home, fails, send


class TestContract(BackendContract):
    @pytest.fixture
    def subject(self, home: Home) -> Subject:
        return Subject(home.acp(), home.acp("--hangs"), home.acp("--fails"))


@pytest.mark.parametrize("lacks", ["", "resume", "load"])
async def test_a_session_is_gone_on_with(home: Home, lacks: str) -> None:
    backend = home.acp(f"--lacks={lacks}")
    known: list[str] = []
    outputs: list[Output] = []
    first = await send(backend, "One.", on_session=known.append)
    again = await send(
        backend, "Two.", session_id=first.session_id, resume=True, on_session=known.append, on_output=outputs.append
    )
    assert known == [first.session_id, first.session_id]
    assert [text for _, text in home.calls[-1]["said"]] == ["One.", first.text, "Two."]
    assert again.text == "".join(output.text for output in outputs if output.kind == "text")
    opened = [one["method"] for one in home.noted("heard") if str(one.get("method")).startswith("session/")]
    assert opened[2] == ("session/load" if lacks == "resume" else "session/resume")


async def test_an_agent_that_cannot_go_on_is_told_what_was_said(home: Home) -> None:
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    notices: list[Output] = []
    backend = home.acp("--lacks=load,resume")
    reply = await send(backend, "Who?", session_id="s-1", resume=True, history=history, on_output=notices.append)
    assert reply.session_id not in {None, "s-1"}
    assert "My name is Ada." in home.prompts[0]
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert "cannot continue a session" in notices[0].text
    error = await fails(home.acp(on_lost_session="fail"), "Who?", session_id="s-1", resume=True, history=history)
    assert error.kind is ErrorKind.SESSION_LOST


async def test_the_session_is_known_before_the_model_has_answered(home: Home) -> None:
    seen: list[str] = []

    def on_session(session: str) -> None:
        seen.append(session)
        (home.path / "go").touch()

    await send(home.acp(), f"One. [[until {home.path / 'go'}]]", on_session=on_session)
    assert seen == [home.calls[0]["session"]]


async def test_model_and_mode_are_set(home: Home) -> None:
    await send(home.acp(model="large", mode="Bold"), "One.")
    assert home.calls[0]["settings"] == {"session/set_model": "large", "session/set_mode": "bold"}
    error = await fails(home.acp(model="huge"), "One.")
    assert error.kind is ErrorKind.INVALID_REQUEST
    assert "small, large" in error.message
    assert len(home.calls) == 1


async def test_an_agent_is_logged_in_only_in_a_way_that_was_named(home: Home) -> None:
    error = await fails(home.acp("--login"), "One.")
    assert error.kind is ErrorKind.AUTH
    assert "key (A key)" in error.message
    assert "authenticate" not in [one.get("method") for one in home.noted("heard")]
    assert (await send(home.acp("--login", auth_method="key"), "One.")).text
    error = await fails(home.acp("--login", auth_method="nonsense"), "One.")
    assert error.kind is ErrorKind.AUTH


async def test_neither_prompt_nor_foreign_secrets_reach_argv_or_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    monkeypatch.setenv("WANTED", "by the user")
    seen: list[bytes] = []

    def look(output: Output) -> None:
        for pid in home.processes:
            seen.extend(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        (home.path / "go").touch()

    backend = home.acp(pass_env=("WANTED",))
    await send(backend, f"SECRET-PROMPT [[tool]] [[until {home.path / 'go'}]]", on_output=look)
    both = b"".join(seen)
    assert b"by the user" in both
    assert b"SECRET-PROMPT" not in both
    assert b"hunter2" not in both


async def test_files_of_a_turn_are_for_this_user_alone(home: Home) -> None:
    files = home.files()
    await send(home.acp(), "One.", files=files)
    found = [files.turn, *files.turn.rglob("*"), *files.sessions.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if not path.is_dir()} == {0o600}


async def test_what_is_no_message_is_passed_over(home: Home) -> None:
    outputs: list[Output] = []
    reply = await send(home.acp(), "Hm. [[noise]] [[say fine]]", on_output=outputs.append)
    assert reply.text == "fine"
    assert "".join(output.text for output in outputs if output.kind == "text") == "fine"


async def test_large_messages_in_both_directions(home: Home) -> None:
    prompt = "Ü" * 300_000 + " [[huge 1000000]]"
    reply = await send(home.acp(), prompt)
    assert reply.text == "x" * 1_000_000
    assert home.prompts == [prompt]


async def test_a_message_that_is_too_long_to_be_read_is_left_out(home: Home) -> None:
    notices: list[Output] = []
    with pytest.raises(BackendError) as caught:
        await send(home.acp(), "[[huge 20000000]]", on_output=notices.append)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT
    assert "too long" in notices[-1].text


async def test_a_schema_is_asked_for_and_a_wrong_answer_mended(home: Home) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good"]}}, "required": ["mood"]}
    reply = await send(home.acp(), "Say it. [[plain]]", output_schema=schema)
    assert reply.data == {"mood": "good"}
    assert [call["session"] for call in home.calls] == [reply.session_id] * 2
    assert reply.usage == Usage(30, 14, 0.002, "small", 10)


async def test_cost_is_the_turns_own_also_where_the_agent_tells_the_sessions(home: Home) -> None:
    backend, files = home.acp(), home.files
    first = await send(backend, "One.", files=files(1, "a"))
    second = await send(backend, "Two.", session_id=first.session_id, resume=True, files=files(1, "b"))
    assert [first.usage, second.usage] == [Usage(15, 7, 0.001, "small", 5)] * 2


async def test_a_failed_turn_costs_what_it_did_alone(home: Home) -> None:
    backend, files = home.acp(), home.files
    first = await send(backend, "One.", files=files(1, "a"))
    error = await fails(backend, "[[stop refusal]]", session_id=first.session_id, resume=True, files=files(1, "b"))
    assert error.kind is ErrorKind.REFUSED
    assert error.usage == Usage(15, 7, 0.001, "small", 5)


async def test_branches_leave_their_parent_as_it_was(home: Home) -> None:
    # Only agents that are known to be able to are asked to.
    (home.path / "opencode").write_text((home.path / "acp").read_text())
    (home.path / "opencode").chmod(0o755)
    backend = AcpBackend(command=[str(home.path / "opencode")], cwd=home.path)
    assert backend.can_fork
    assert not home.acp().can_fork
    parent = await send(backend, "Parent.")
    one, two = [await send(backend, prompt, fork_of=parent.session_id) for prompt in ("One.", "Two.")]
    assert len({parent.session_id, one.session_id, two.session_id}) == 3
    users = [[text for role, text in call["said"] if role == "user"] for call in home.calls]
    assert users == [["Parent."], ["Parent.", "One."], ["Parent.", "Two."]]


def test_options_that_make_no_sense_are_refused() -> None:
    for command in ("goose acp", [], ()):
        with pytest.raises(ValueError, match="list of words"):
            AcpBackend(command=command)
    with pytest.raises(ValueError, match="permissions"):
        AcpBackend(command=["goose"], permissions="maybe")  # type: ignore[arg-type]


async def test_a_session_that_has_another_ones_id_by_now_is_not_gone_on_with(home: Home) -> None:
    goose = home.acp("--name=goose")  # which counts the sessions of a day
    other = await send(goose, "The launch code is 1234.")
    known = {"session_id": other.session_id, "resume": True}
    history = (Message("user", "My name is Ada."), Message("assistant", "Hello Ada."))
    reply = await send(goose, "Who am I?", **known, history=history)
    assert reply.session_id != other.session_id
    assert [message.role for message in reply.messages] == ["user", "system", "assistant"]
    assert "My name is Ada." in home.prompts[-1]
    assert "1234" not in str(home.calls[-1]["said"])
    history = (Message("user", "The launch code is 1234."), Message("assistant", other.text))
    assert (await send(goose, "And now?", **known, history=history)).session_id == other.session_id
