"""The machine that holds a turn with an agent that speaks ACP: what it says, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.backends.agents.acp_machine import AcpMachine
from plait.backends.agents.agent_output import AgentCall, ProcessEnd
from plait.errors import ErrorKind
from tests.support.agents.acp_talks import (
    AIMS,
    NOWHERE,
    OPEN,
    Held,
    chunk,
    done,
    failed,
    hold,
    new_talk,
    start,
    tool,
    update,
)
from tests.support.agents.recorded import NOW


@pytest.mark.parametrize(
    ("call", "capabilities", "method"),
    [
        (AgentCall(NOWHERE, "x", resume=True), {"loadSession": True}, "session/load"),
        (AgentCall(NOWHERE, "x", resume=True), {"sessionCapabilities": {"resume": {}}}, "session/resume"),
        (
            AgentCall(NOWHERE, "x", resume=True),
            {"loadSession": True, "sessionCapabilities": {"resume": {}}},
            "session/resume",
        ),
        (
            AgentCall(NOWHERE, "x", resume=True),
            {"loadSession": True, "sessionCapabilities": {"resume": None}},
            "session/load",
        ),
        (AgentCall(NOWHERE, "x", resume=True), {"sessionCapabilities": []}, None),
        (AgentCall(NOWHERE, None, resume=True), {"loadSession": True}, None),
        (AgentCall(NOWHERE, forks="x"), {"sessionCapabilities": {"fork": {}}}, "session/fork"),
        (AgentCall(NOWHERE, forks="x"), {"loadSession": True}, None),
    ],
)
def test_a_session_is_opened_as_the_agent_is_able_to(call: AgentCall, capabilities: Any, method: str | None) -> None:
    held = hold(AcpMachine(call, AIMS, lambda: NOW), [start(**capabilities)])
    if method is None:
        assert held.error is not None
        assert held.error.kind is ErrorKind.SESSION_LOST
    else:
        assert held.methods == ["initialize", method]
        assert held.said[1]["params"] == {"sessionId": "x", "cwd": AIMS.cwd, "mcpServers": []}


def test_earlier_prompts_are_looked_for_where_another_session_may_have_the_same_id() -> None:
    def opened(name: str) -> str:
        goals = replace(AIMS, prompt="go on", earlier_prompts=("Work.",))
        talk = AcpMachine(AgentCall(NOWHERE, "x", resume=True), goals, lambda: NOW)
        able = start(name=name, loadSession=True, sessionCapabilities={"resume": {}})
        return hold(talk, [able]).methods[1]

    assert [opened("goose"), opened("gemini")] == ["session/load", "session/resume"]


def test_a_prompt_that_never_got_into_the_session_is_found_out() -> None:
    def load(*heard: str) -> Held:
        goals = replace(AIMS, prompt="go on", holds=("Please  work\nhard", "go on"))
        talk = AcpMachine(AgentCall(NOWHERE, "x", resume=True), goals, lambda: NOW)
        able = start(loadSession=True, sessionCapabilities={"resume": {}})
        history = [update("user_message_chunk", "x", content={"type": "text", "text": text}) for text in heard]
        return hold(talk, [able, *history, {"id": 2, "result": {}}, chunk("ok", "x"), done()])

    assert load("before", "Please work ", "hard.").methods == ["initialize", "session/load", "session/prompt"]
    lost = load("before")
    assert lost.error is not None
    assert lost.error.kind is ErrorKind.SESSION_LOST
    assert "session/prompt" not in lost.methods


MODELS = {"models": {"availableModels": [{"modelId": "m/1", "name": "One"}], "currentModelId": "m/0"}}
CONFIG = {
    "configOptions": [
        {"id": "model", "category": "model", "currentValue": "m/0", "options": [
            {"group": "g", "name": "G", "options": [{"value": "m/1", "name": "One"}]}]},
        {"id": "mode", "category": "mode", "currentValue": "a", "options": [{"value": "b", "name": "Bold"}]},
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    ("offers", "goals", "said"),
    [
        (MODELS, {"model": "m/1"}, [("session/set_model", {"modelId": "m/1"})]),
        (MODELS, {"model": "One"}, [("session/set_model", {"modelId": "m/1"})]),
        (MODELS, {"model": "m/9"}, [("session/set_model", {"modelId": "m/9"})]),
        (MODELS, {"model": "m/0"}, []),
        (CONFIG, {"model": "One"}, [("session/set_config_option", {"configId": "model", "value": "m/1"})]),
        (
            CONFIG,
            {"model": "m/1", "mode": "Bold"},
            [
                ("session/set_config_option", {"configId": "model", "value": "m/1"}),
                ("session/set_config_option", {"configId": "mode", "value": "b"}),
            ],
        ),
        ({"configOptions": [{"id": "mode", "currentValue": "a"}]}, {"mode": "a"}, []),
        ({}, {"mode": "b"}, [("session/set_mode", {"modeId": "b"})]),
    ],
)
def test_model_and_mode_are_set_as_the_agent_offers_them(offers: Any, goals: Any, said: Any) -> None:
    opened = {"id": 2, "result": {"sessionId": "s-1", **offers}}
    held = hold(
        new_talk(**goals), [start(), opened, {"id": 5, "result": {}}, {"id": 6, "result": {}}, chunk("x"), done()]
    )
    set_up = [(one["method"], one["params"]) for one in held.said[2:-1]]
    assert set_up == [(method, {"sessionId": "s-1", **params}) for method, params in said]
    assert held.methods[-1] == "session/prompt"
    assert held.answered is not None


def test_a_model_that_there_is_not_is_named_with_those_that_there_are() -> None:
    opened = {"id": 2, "result": {"sessionId": "s-1", **MODELS}}
    held = hold(new_talk(model="m/9"), [start(), opened, failed({"code": -32602, "message": "Invalid params"}, 5)])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST
    assert "m/1" in held.error.message
    assert not held.error.continues_session


def test_an_agent_of_another_version_is_not_talked_to() -> None:
    began = start()
    began["result"]["protocolVersion"] = 2
    held = hold(new_talk(), [began])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST
    assert held.methods == ["initialize"]


def test_each_tool_call_is_shown_once() -> None:
    held = hold(new_talk(), [start(), OPEN, tool("t-1"), tool("t-2"), tool("t-1"), chunk("ok"), done()])
    assert held.shown == [("tool", "Look"), ("tool", "Look")]


def ask(title: str, identity: Any = "p-1", **raw: Any) -> dict[str, Any]:
    options = [
        {"optionId": "o1", "name": "Yes", "kind": "allow_once"},
        {"optionId": "o2", "name": "Yes", "kind": "allow_always"},
        {"optionId": "o3", "name": "No", "kind": "reject_once"},
    ]
    tool = {"toolCallId": "t-1", "title": title, "kind": "execute", "rawInput": raw}
    params = {"sessionId": "s-1", "toolCall": tool, "options": options}
    return {"id": identity, "method": "session/request_permission", "params": params}


def test_a_question_names_the_deed_and_the_options_once_each() -> None:
    held = hold(new_talk(permissions="ask"), [start(), OPEN, chunk("Well."), ask("rm -r build", command="rm -r build")])
    assert held.answered is not None
    question = held.answered.question
    assert question is not None
    assert "rm -r build" in question.text
    assert question.schema == {"enum": ["Yes", "Yes (o2)", "No"]}
    assert held.answered.text == f"Well.\n\n({question.text})"
    assert held.methods[-2:] == ["session/cancel", ""]
    assert held.talk.session_id == "s-1"


def test_what_an_agent_shows_of_a_deed_cannot_move_a_terminals_cursor() -> None:
    held = hold(new_talk(permissions="ask"), [start(), OPEN, ask("\x1b[2Jrm\r\nx")])
    assert held.answered is not None
    assert held.answered.question is not None
    assert held.answered.question.text.isprintable()


def test_a_person_decides_about_one_deed_alone() -> None:
    first = hold(new_talk(permissions="ask"), [start(), OPEN, ask("x", command="a", description="why")])
    assert first.talk.permission_request is not None
    granted = {first.talk.permission_request.action_id: "Yes (o2)"}

    def outcome(**raw: str) -> tuple[Any, Any]:
        held = hold(new_talk(permissions="ask", granted=granted), [start(), OPEN, ask("x", **raw)])
        return held.said[-1]["result"]["outcome"].get("optionId"), held.talk.permission_request

    assert outcome(command="a", description="worded anew") == ("o2", None)
    other, wish = outcome(command="b", description="why")
    assert other is None
    assert wish is not None


def test_who_gives_up_when_it_is_denied_has_no_answer() -> None:
    talk = new_talk(permissions="deny")
    held = hold(talk, [start(), OPEN, chunk("I shall."), ask("touch x"), done()])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST
    assert "touch x" in held.error.message
    held = hold(new_talk(permissions="deny"), [start(), OPEN, ask("touch x"), chunk("Without, then."), done()])
    assert held.answered is not None
    assert ("notice", "not allowed: touch x") in held.shown


def test_what_nobody_asked_for_is_no_answer() -> None:
    odd = [{"id": 7, "result": {"stopReason": "end_turn"}}, {"id": True, "result": {}}, {"id": 1.0, "result": {}}]
    held = hold(new_talk(), [*odd, start(), *odd, OPEN, OPEN, chunk("yes"), chunk("no", session="other"), done()])
    assert held.answered is not None
    assert held.methods.count("session/new") == held.methods.count("session/prompt") == 1
    assert held.answered.text == "yes"


def test_requests_for_what_we_do_not_offer_are_refused() -> None:
    held = hold(
        new_talk(), [start(), OPEN, {"id": "f", "method": "fs/read_text_file", "params": {}}, chunk("x"), done()]
    )
    assert next(one for one in held.said if one.get("id") == "f")["error"]["code"] == -32601


def test_an_agent_that_ends_without_a_word_has_crashed() -> None:
    held = hold(new_talk(), [start(), OPEN, chunk("half")], ProcessEnd(-9, "it said why"))
    assert held.error is not None
    assert (held.error.kind, held.error.continues_session) == (ErrorKind.CRASHED, True)
    assert "SIGKILL" in held.error.message
    held = hold(new_talk(), [], ProcessEnd(127, "cannot start goose: No such file or directory"))
    assert held.error is not None
    assert "cannot start goose" in held.error.message
    assert not held.error.continues_session
