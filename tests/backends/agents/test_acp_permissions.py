"""Permissions that an agent that speaks ACP asks for, and the persons who decide, shown on a fake one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from plait.backends import AcpBackend, Answer, Output, Reply
from tests.support.agents.homes import Home, send, until


@pytest.mark.parametrize(("permissions", "outcome"), [("deny", "r1"), ("allow", "a1")])
async def test_permission_is_what_the_user_wrote_down(home: Home, permissions: Any, outcome: str) -> None:
    outputs: list[Output] = []
    backend = home.acp(permissions=permissions)
    reply = await send(backend, "Do. [[ask rm x]] [[say done]]", on_output=outputs.append)
    assert reply.text == "done"
    assert home.noted("outcomes") == [{"outcome": "selected", "optionId": outcome}]
    assert ("not allowed: rm x" in [output.text for output in outputs]) == (permissions == "deny")


async def _asked(backend: AcpBackend, title: str, **request: Any) -> Reply:
    reply = await send(backend, f"Do. [[ask {title}]] [[say done]]", **request)
    assert reply.question is not None
    assert reply.question.schema == {"enum": ["Always allow", "Allow", "Reject"]}
    assert title in reply.question.text
    assert reply.session_id is not None
    return reply


@pytest.mark.parametrize(
    ("choice", "outcome", "deaf"),
    [("Allow", "a1", ()), ("Allow", "a1", ("--deaf",)), ("Always allow", "a2", ()), ("Reject", "r1", ())],
)
async def test_a_person_is_asked_and_the_answer_reaches_that_very_deed(
    home: Home, choice: str, outcome: str, deaf: tuple[str, ...]
) -> None:
    asked = await _asked(home.acp(*deaf, permissions="ask"), "rm x", files=home.files(1))
    assert home.noted("outcomes") == [{"outcome": "cancelled"}]
    request = {"session_id": asked.session_id, "resume": True, "answer": Answer(choice)}
    # Another object stands for another process, days later.
    reply = await send(
        home.acp(permissions="ask"), f"{choice} [[ask rm x]] [[say done]]", files=home.files(2), **request
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
        group.start_soon(lambda: send(backend, "Allow [[until /dev/null/never]]", **answered))
        await until(lambda: len(home.calls) == 2)
        group.cancel_scope.cancel()
    plain = home.calls[0]["session"]
    await send(
        backend, "Go on. [[ask rm x]]", session_id=plain, resume=True, resumes_interrupted=True, files=home.files(3)
    )
    assert home.noted("outcomes")[-1]["optionId"] == "a1"
