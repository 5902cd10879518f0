"""Turns with an agent that speaks ACP, shown on a fake one that keeps its own sessions."""

from __future__ import annotations

import random
import stat
from pathlib import Path
from typing import Any

import anyio
import pytest

from backends import (
    AcpBackend,
    Answer,
    BackendError,
    BackendUnavailable,
    ErrorKind,
    Message,
    Opening,
    Output,
    Reply,
    Usage,
)
from backends.contract import BackendContract, Subject
from tests.support.agents import Home, make_home, until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return make_home(tmp_path / "home", monkeypatch)


class TestContract(BackendContract):
    @pytest.fixture
    def subject(self, home: Home) -> Subject:
        return Subject(home.acp(), home.acp("--hangs"), home.acp("--fails"))


async def send(backend: AcpBackend, prompt: str, **opening: Any) -> Reply:
    async with backend.open(Opening(**opening)) as conversation:
        return await conversation.send(prompt)


async def fails(backend: AcpBackend, prompt: str, **opening: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await send(backend, prompt, **opening)
    return caught.value


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
    assert "cannot go on with a session" in notices[0].text
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
    assert reply.usage == Usage(30, 14, 0.002)


async def test_cost_is_the_turns_own_also_where_the_agent_tells_the_sessions(home: Home) -> None:
    backend, files = home.acp(), home.files
    first = await send(backend, "One.", files=files(1, "a"))
    second = await send(backend, "Two.", session_id=first.session_id, resume=True, files=files(1, "b"))
    assert [first.usage, second.usage] == [Usage(15, 7, 0.001)] * 2


async def test_a_failed_turn_costs_what_it_did_alone(home: Home) -> None:
    backend, files = home.acp(), home.files
    first = await send(backend, "One.", files=files(1, "a"))
    error = await fails(backend, "[[stop refusal]]", session_id=first.session_id, resume=True, files=files(1, "b"))
    assert error.kind is ErrorKind.REFUSED
    assert error.usage == Usage(15, 7, 0.001)


async def test_branches_leave_their_parent_as_it_was(home: Home) -> None:
    # Only agents that are known to be able to are asked to.
    (home.path / "opencode").write_text((home.path / "acp").read_text())
    (home.path / "opencode").chmod(0o755)
    backend = AcpBackend(command=[str(home.path / "opencode")], cwd=home.path)
    assert backend.can_fork
    assert not home.acp().can_fork
    parent = await send(backend, "Parent.")
    one, two = [await send(backend, prompt, forks=parent.session_id) for prompt in ("One.", "Two.")]
    assert len({parent.session_id, one.session_id, two.session_id}) == 3
    users = [[text for role, text in call["said"] if role == "user"] for call in home.calls]
    assert users == [["Parent."], ["Parent.", "One."], ["Parent.", "Two."]]


@pytest.mark.parametrize(("permissions", "outcome"), [("deny", "r1"), ("allow", "a1")])
async def test_permission_is_what_the_user_wrote_down(home: Home, permissions: Any, outcome: str) -> None:
    outputs: list[Output] = []
    backend = home.acp(permissions=permissions)
    reply = await send(backend, "Do. [[ask rm x]] [[say done]]", on_output=outputs.append)
    assert reply.text == "done"
    assert home.noted("outcomes") == [{"outcome": "selected", "optionId": outcome}]
    assert ("not allowed: rm x" in [output.text for output in outputs]) == (permissions == "deny")


async def _asked(backend: AcpBackend, title: str, **opening: Any) -> Reply:
    reply = await send(backend, f"Do. [[ask {title}]] [[say done]]", **opening)
    assert reply.question is not None
    assert reply.question.schema == {"enum": ["Always allow", "Allow", "Reject"]}
    assert title in reply.question.text
    assert reply.session_id is not None
    return reply


@pytest.mark.parametrize(("choice", "outcome"), [("Allow", "a1"), ("Always allow", "a2"), ("Reject", "r1")])
@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
async def test_a_person_is_asked_and_the_answer_reaches_that_very_deed(
    home: Home, choice: str, outcome: str, deaf: tuple[str, ...]
) -> None:
    if deaf and choice != "Allow":
        return
    asked = await _asked(home.acp(*deaf, permissions="ask"), "rm x", files=home.files(1))
    assert home.noted("outcomes") == [{"outcome": "cancelled"}]
    opening = {"session_id": asked.session_id, "resume": True, "answer": Answer(choice)}
    # Another object stands for another process, days later.
    reply = await send(
        home.acp(permissions="ask"), f"{choice} [[ask rm x]] [[say done]]", files=home.files(2), **opening
    )
    assert reply.question is None
    assert reply.text == "done"
    assert reply.session_id == home.calls[0]["session"] == home.calls[1]["session"]
    assert home.noted("outcomes")[-1]["optionId"] == outcome
    assert home.prompts[1].endswith(f"The answer is: {choice} [[ask rm x]] [[say done]]")


async def test_another_deed_is_asked_about_anew(home: Home) -> None:
    backend = home.acp(permissions="ask")
    asked = await _asked(backend, "rm x", files=home.files(1))
    again = await _asked(backend, "rm y", session_id=asked.session_id, resume=True, answer=Answer("Allow"))
    assert again.session_id != asked.session_id
    assert home.noted("outcomes") == [{"outcome": "cancelled"}] * 2


async def test_what_was_decided_outlives_a_turn_that_was_cut(home: Home) -> None:
    backend = home.acp(permissions="ask")
    asked = await _asked(backend, "rm x", files=home.files(1))
    answered = {"session_id": asked.session_id, "resume": True, "answer": Answer("Allow"), "files": home.files(2)}
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: send(backend, "Allow [[until /nowhere]]", **answered))
        await until(lambda: len(home.calls) == 2)
        group.cancel_scope.cancel()
    plain = home.calls[0]["session"]
    await send(backend, "Go on. [[ask rm x]]", session_id=plain, resume=True, goes_on=True, files=home.files(3))
    assert home.noted("outcomes")[-1]["optionId"] == "a1"


async def test_a_cut_turn_is_gone_on_with_and_its_prompt_not_sent_twice(home: Home) -> None:
    backend = home.acp()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: send(backend, "Work. [[tool]] [[until /nowhere]]", files=home.files(1)))
        await until(lambda: len(home.calls) == 1)
        group.cancel_scope.cancel()
    left = backend.left(home.files(1))
    assert left is not None
    assert left.session_id == home.calls[0]["session"]
    await send(backend, "Go on.", session_id=left.session_id, resume=True, goes_on=True, files=home.files(2))
    said = [text for _, text in home.calls[-1]["said"]]
    assert said == ["Work. [[tool]] [[until /nowhere]]", "make test", "Go on."]


async def test_who_is_to_go_on_in_a_session_without_the_prompt_starts_over(home: Home) -> None:
    backend = home.acp()
    other = await send(backend, "Something else.", files=home.files(1, "other"))
    await fails(backend, "Work. [[die]]", files=home.files(1))
    error = await fails(backend, "Go on.", session_id=other.session_id, resume=True, goes_on=True, files=home.files(2))
    assert error.kind is ErrorKind.SESSION_LOST
    assert len(home.calls) == 2


async def test_two_writers_of_one_session_go_one_after_the_other(home: Home) -> None:
    backend = home.acp()
    first = await send(backend, "First.", files=home.files(1))
    waits: list[Output] = []

    def note(output: Output) -> None:
        waits.append(output)
        (home.path / "go").touch()

    going_on = {"session_id": first.session_id, "resume": True}
    async with anyio.create_task_group() as group:
        prompt = f"Long. [[until {home.path / 'go'}]]"
        group.start_soon(lambda: send(backend, prompt, files=home.files(2, "a"), **going_on))
        await until(lambda: len(home.calls) == 2)
        await send(backend, "Short.", files=home.files(3, "b"), on_output=note, **going_on)
    assert waits[0].kind == "waiting"
    assert [text for role, text in home.calls[-1]["said"] if role == "user"] == ["First.", prompt, "Short."]


@pytest.mark.parametrize("deaf", [(), ("--deaf",)])
async def test_a_cancelled_turn_is_told_so_and_leaves_nothing_behind(home: Home, deaf: tuple[str, ...]) -> None:
    backend = home.acp(*deaf, *(["--immortal"] if deaf else []))
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: send(backend, "Work. [[child]] [[until /nowhere]]", files=home.files()))
        await until(lambda: len(home.calls) == 1)
        group.cancel_scope.cancel()
        cancelled = anyio.current_time()
    assert anyio.current_time() - cancelled < 6
    assert home.noted("heard")[-1]["method"] == "session/cancel"
    assert home.processes == []


async def test_a_turn_takes_no_longer_than_it_may(home: Home) -> None:
    error = await fails(home.acp(turn_timeout=3.0), "Work. [[until /nowhere]]", files=home.files())
    assert (error.kind, error.goes_on) == (ErrorKind.TIMEOUT, True)
    error = await fails(home.acp(idle_timeout=0.7), "Work. [[until /nowhere]]", files=home.files(2))
    assert error.kind is ErrorKind.TIMEOUT
    assert home.processes == []


async def test_an_agent_that_dies_has_crashed(home: Home) -> None:
    error = await fails(home.acp(), "[[die]]")
    assert (error.kind, error.goes_on) == (ErrorKind.CRASHED, True)
    assert "SIGKILL" in error.message


async def test_an_agent_that_cannot_be_started(home: Home) -> None:
    with pytest.raises(BackendUnavailable, match="nonsense"):
        await send(AcpBackend(command=["/nowhere/nonsense"]), "One.")
    broken = home.path / "broken"
    broken.write_text("#!/nowhere/interpreter\n")
    broken.chmod(0o755)
    error = await fails(AcpBackend(command=[str(broken)], cwd=home.path), "One.")
    assert error.kind is ErrorKind.CRASHED
    assert "cannot start" in error.message


@pytest.mark.parametrize("seed", range(6))
async def test_cancelled_at_any_moment_nothing_is_left(home: Home, seed: int) -> None:
    rng = random.Random(seed)
    words = rng.choice(["", "[[child]] [[tool]]", "[[ask rm x]]", "[[huge 100000]]"])
    options = {"permissions": rng.choice(["deny", "ask"])}
    for number in range(4):
        with anyio.move_on_after(rng.uniform(0, 0.5)):
            await send(home.acp(**options), f"Work. {words} [[until /nowhere]]", files=home.files(number + 1))
    assert home.processes == []
    assert not [line for line in home.noted("calls") if line["said"][0][1] != f"Work. {words} [[until /nowhere]]"]


def test_options_that_make_no_sense_are_refused() -> None:
    for command in ("goose acp", [], ()):
        with pytest.raises(ValueError, match="list of words"):
            AcpBackend(command=command)
    with pytest.raises(ValueError, match="permissions"):
        AcpBackend(command=["goose"], permissions="maybe")  # type: ignore[arg-type]
