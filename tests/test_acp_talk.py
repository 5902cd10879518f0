"""The machine that holds a turn with an agent that speaks ACP: on what real agents said, and on what nobody says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.agents.acp_permits import Grant
from backends.agents.acp_talk import Aims, Talk
from backends.agents.acp_wire import name_of, prompt_of
from backends.agents.program import Answered, Call, Ending
from backends.errors import BackendError, ErrorKind
from backends.protocol import Output, Usage
from tests.support.recorded import NOW, ROOT

RECORDED = sorted(path.stem for path in (ROOT / "acp").glob("*.jsonl"))
AIMS = Aims("/home/user/project", permissions="allow", prompt="the prompt")
NOWHERE = Path("/nowhere")
ENDED = Ending(0)
OURS = {"initialize": 1, "session/new": 2, "session/load": 2, "session/prompt": 7}


@dataclass
class Recorded:
    """One prompt and all that the agent said about it, from its start, numbered as we number our requests."""

    prompt: str
    opened_with: str
    session: str
    said: list[dict[str, Any]]


def recorded_turns(agent: str) -> Iterator[Recorded]:
    for lines in _connections(agent):
        methods = {msg["id"]: msg["method"] for side, msg in lines if side == "client" and "method" in msg}
        before: list[dict[str, Any]] = []
        turn: Recorded | None = None
        opened, session = "", ""
        for side, msg in lines:
            if side == "client" and msg.get("method") in {"session/new", "session/load"} and turn is None:
                opened, session = msg["method"], msg["params"].get("sessionId", "")
            if side == "client" and msg.get("method") == "session/prompt":
                session = msg["params"]["sessionId"]
                turn = Recorded(msg["params"]["prompt"][0]["text"], opened, session, list(before))
            if side != "agent":
                continue
            is_ours = "method" not in msg
            message = {**msg, "id": OURS[methods[msg["id"]]]} if is_ours else msg
            (before if turn is None else turn.said).append(message)
            if turn is not None and is_ours and methods[msg["id"]] == "session/prompt":
                yield turn
                turn = None


def _connections(agent: str) -> list[list[tuple[str, Any]]]:
    found: list[list[tuple[str, Any]]] = [[]]
    for line in (ROOT / "acp" / f"{agent}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["dir"] == "event":
            found.append([])
        else:
            found[-1].append((entry["dir"], entry["msg"]))
    return found


@dataclass
class Held:
    """A turn as it was held: what we said, what was shown, and what came of it."""

    talk: Talk
    said: list[dict[str, Any]]
    outputs: list[Output]
    answered: Answered | None = None
    error: BackendError | None = None

    @property
    def methods(self) -> list[str]:
        return [message.get("method", "") for message in self.said]

    @property
    def streamed(self) -> str:
        return "".join(output.text for output in self.outputs if output.kind == "text")

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(output.kind, output.text) for output in self.outputs if output.kind != "text"]


def hold(talk: Talk, messages: list[Any], ending: Ending = ENDED) -> Held:
    held = Held(talk, list(talk.take()), [])
    for message in messages:
        held.outputs += talk.read(message)
        held.said += talk.take()
    try:
        held.answered = talk.end(ending)
    except BackendError as error:
        held.error = error
    return held


def talk_of(turn: Recorded, aims: Aims = AIMS) -> Talk:
    resume = turn.opened_with == "session/load"
    call = Call(NOWHERE, turn.session if resume else None, resume=resume)
    # So that what is recorded of loading is an answer to what we ask.
    holds = ("first TURN-A",) if resume else ()
    return Talk(call, replace(aims, prompt=turn.prompt, holds=holds), lambda: NOW)


ANSWERS = {
    "claude-agent-acp-0.100.0": ("STUB: 1 messages", "STUB: 5 messages", "STUB: 7 messages"),
    "codex-acp-2.6.0": ("STUB: 4 messages", "STUB: 8 messages", "STUB: 10 messages"),
    "goose-1.52.0": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
    "opencode-1.18.33": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
    "qwen-0.24.4": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
}
TOKENS = {
    "claude-agent-acp-0.100.0": (Usage(16, 7, 0.000279), Usage(32, 14, 0.0006975), Usage(16, 7, 0.000279)),
    "codex-acp-2.6.0": (Usage(11, 7), Usage(22, 14), Usage(11, 7)),
    # These tell of a turn's last request alone.
    "goose-1.52.0": (Usage(11, 7), Usage(11, 7), Usage(11, 7)),
    "opencode-1.18.33": (Usage(11, 7, 0.0), Usage(11, 7, 0.0), Usage(11, 7, 0.0)),
    "qwen-0.24.4": (Usage(11, 7), Usage(22, 14), Usage(11, 7)),
}


@pytest.mark.parametrize("agent", ANSWERS)
def test_what_the_real_agents_said(agent: str) -> None:
    held = [hold(talk_of(turn), turn.said) for turn in recorded_turns(agent)]
    assert [one.error for one in held] == [None] * 3
    answers = [one.answered for one in held if one.answered is not None]
    for answer, text in zip(answers, ANSWERS[agent], strict=True):
        assert answer.text.startswith(text)
    assert tuple(answer.usage for answer in answers) == TOKENS[agent]
    for one in held:
        assert one.talk.session_id is not None
        assert one.answered is not None
        assert one.answered.text in one.streamed  # some have warnings in front of it
    assert held[2].streamed.count("STUB:") == 1, "the history that was loaded is no answer"
    assert any(kind == "tool" for kind, _ in held[1].shown)
    assert held[0].methods == ["initialize", "session/new", "session/prompt"]
    assert held[2].methods == ["initialize", "session/load", "session/prompt"]
    assert prompt_of(held[2].said[-1]) == "after load"


def test_gemini_is_not_made_to_load_a_session_which_it_would_lose() -> None:
    turns = list(recorded_turns("gemini-0.61.0"))
    first, second = (hold(talk_of(turn), turn.said) for turn in turns[:2])
    assert first.answered is not None
    assert first.answered.usage == Usage(11, 7)
    assert second.answered is not None
    assert second.answered.usage == Usage(22, 14)
    third = hold(talk_of(turns[2]), turns[2].said)
    assert third.error is not None
    assert third.error.kind is ErrorKind.SESSION_LOST
    assert third.methods == ["initialize"]


@pytest.mark.parametrize("agent", ["claude-agent-acp-0.100.0", "gemini-0.61.0", "qwen-0.24.4"])
def test_permission_is_given_as_it_was_written_down(agent: str) -> None:
    turn = list(recorded_turns(agent))[1]

    def outcome(aims: Aims) -> Any:
        held = hold(talk_of(turn, aims), turn.said)
        identity = next(one["id"] for one in turn.said if one.get("method") == "session/request_permission")
        return next(one["result"]["outcome"] for one in held.said if "result" in one and one["id"] == identity)

    options = next(one["params"]["options"] for one in turn.said if one.get("method") == "session/request_permission")
    kinds = {option["optionId"]: option["kind"] for option in options}
    assert kinds[outcome(AIMS)["optionId"]] == "allow_once"
    assert kinds[outcome(replace(AIMS, permissions="deny"))["optionId"]] == "reject_once"
    assert outcome(replace(AIMS, permissions="ask")) == {"outcome": "cancelled"}


@pytest.mark.parametrize("agent", RECORDED)
@pytest.mark.parametrize("policy", ["allow", "ask"])
def test_who_takes_a_turn_over_says_what_has_not_been_said(agent: str, policy: Any) -> None:
    for turn in recorded_turns(agent):
        aims = replace(AIMS, permissions=policy)
        whole = hold(talk_of(turn, aims), turn.said)
        for count in range(len(whole.said) + 1):
            talk = talk_of(turn, aims)
            talk.has_said(whole.said[:count])
            again = hold(talk, turn.said)
            assert again.said == whole.said[count:]
            assert again.answered == whole.answered
            assert again.talk.session_id == whole.talk.session_id


def start(**capabilities: Any) -> dict[str, Any]:
    agent = {"name": capabilities.pop("name", "fake"), "title": "Fake"}
    result = {"protocolVersion": 1, "agentInfo": agent, "agentCapabilities": capabilities}
    return {"jsonrpc": "2.0", "id": 1, "result": result}


OPEN = {"jsonrpc": "2.0", "id": 2, "result": {"sessionId": "s-1"}}


def update(kind: str, session: str = "s-1", **more: Any) -> dict[str, Any]:
    return {"method": "session/update", "params": {"sessionId": session, "update": {"sessionUpdate": kind, **more}}}


def chunk(text: str, session: str = "s-1") -> dict[str, Any]:
    return update("agent_message_chunk", session, content={"type": "text", "text": text})


def done(reason: str = "end_turn", **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 7, "result": {"stopReason": reason, **more}}


def failed(error: Any, identity: int = 7) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identity, "error": error}


def new_talk(**aims: Any) -> Talk:
    return Talk(Call(NOWHERE), replace(AIMS, **aims), lambda: NOW)


# What agents answered to a prompt that failed, and what it is.
FAILURES: list[tuple[ErrorKind, str, list[dict[str, Any]], str]] = [
    (ErrorKind.CONTEXT_OVERFLOW, "max_tokens", [chunk("half an ans"), done("max_tokens")], ""),
    (ErrorKind.CONTEXT_OVERFLOW, "more often", [done("max_turn_requests")], ""),
    (ErrorKind.REFUSED, "declined", [chunk("No."), done("refusal")], ""),
    (ErrorKind.CRASHED, "(cancelled)", [chunk("half"), done("cancelled")], ""),
    (ErrorKind.CRASHED, "(something new)", [done("something new")], ""),
    (ErrorKind.INVALID_OUTPUT, "nothing", [done()], ""),
    (
        ErrorKind.RATE_LIMITED,
        "Request rejected (429)",
        [failed({"code": -32603, "message": "API Error: Request rejected (429)", "data": {"errorKind": "rate_limit"}})],
        "claude-agent-acp",
    ),
    (ErrorKind.AUTH, "log in", [failed({"code": -32000, "message": "Authentication required"})], ""),
    (ErrorKind.RATE_LIMITED, "quota", [failed({"code": 429, "message": "quota"})], "gemini-cli"),
    (ErrorKind.TRANSIENT, "down", [failed({"code": 500, "message": "down"})], "gemini-cli"),
    (ErrorKind.AUTH, "key", [failed({"code": 401, "message": "API key"})], "gemini-cli"),
    (
        ErrorKind.TRANSIENT,
        "500",
        [failed({"code": -32603, "message": "Internal error", "data": {"details": "[API Error: 500 x]"}})],
        "qwen-code",
    ),
    (ErrorKind.INVALID_REQUEST, "params", [failed({"code": -32602, "message": "Invalid params"})], ""),
    (
        ErrorKind.RATE_LIMITED,
        "last status: 429",
        [
            chunk("Warning: Model metadata for `m` not found.\n\n"),
            chunk("exceeded retry limit, last status: 429 Too Many Requests\n\n"),
            done(usage=None),
        ],
        "@agentclientprotocol/codex-acp",
    ),
    (
        ErrorKind.INVALID_REQUEST,
        "Codex: no such tool",
        [
            chunk('{"error": {"message": "no such tool", "code": "invalid_request_error"}}\n\n'),
            done(usage=None),
        ],
        "@agentclientprotocol/codex-acp",
    ),
    (
        ErrorKind.RATE_LIMITED,
        "Rate limit exceeded",
        [chunk("Ran into this error: Rate limit exceeded: x.\n\nPlease retry if you think"), done()],
        "goose",
    ),
    (
        ErrorKind.INVALID_REQUEST,
        "Bad request (400)",
        [chunk("Ran into this error: Request failed: Bad request (400): x.\n\nPlease retry"), done()],
        "goose",
    ),
    (
        ErrorKind.OVERLOADED,
        "529",
        [chunk("Ran into this error: Server error: Server error (529 ) at http://x\n\nPlease retry"), done()],
        "goose",
    ),
]


@pytest.mark.parametrize(("kind", "message", "said", "name"), FAILURES)
def test_a_turn_without_an_answer_fails(kind: ErrorKind, message: str, said: list[Any], name: str) -> None:
    began = start(name=name)
    if "codex" in name:
        began["result"]["agentInfo"]["title"] = "Codex"
    held = hold(new_talk(), [began, OPEN, *said])
    assert held.error is not None, held.answered
    assert (held.error.kind, held.error.goes_on) == (kind, True)
    assert message in held.error.message
    assert "\n" not in held.error.message


def test_the_same_words_are_an_answer_of_agents_that_do_not_tell_errors_so() -> None:
    for said in ([chunk("Ran into this error: x"), done()], [chunk("429"), done(usage=None)]):
        held = hold(new_talk(), [start(), OPEN, *said])
        assert held.error is None


def test_when_a_limit_ends_is_read_from_the_words() -> None:
    error = {
        "code": -32603,
        "message": "Usage limit reached, try again in 2 hours",
        "data": {"errorKind": "rate_limit"},
    }
    held = hold(new_talk(), [start(), OPEN, failed(error)])
    assert held.error is not None
    assert held.error.retry_after == 7200


LOST = [
    {"code": -32002, "message": "Resource not found", "data": "Session not found: x"},
    {"code": -32603, "message": "Internal error", "data": {"details": "no rollout found for thread id x"}},
    {"code": -32603, "message": "Internal error: OpenCode service failure", "data": {"service": "session"}},
    {"code": -32602, "message": "Session not found: x"},
]


@pytest.mark.parametrize("error", LOST)
def test_a_session_that_the_agent_does_not_know_is_lost(error: Any) -> None:
    talk = Talk(Call(NOWHERE, "x", resume=True), AIMS, lambda: NOW)
    held = hold(talk, [start(loadSession=True), failed(error, 2)])
    assert held.error is not None
    assert (held.error.kind, held.error.goes_on) == (ErrorKind.SESSION_LOST, False)


def test_a_session_that_is_busy_is_not_lost() -> None:
    talk = Talk(Call(NOWHERE, "x", resume=True), AIMS, lambda: NOW)
    busy = {"code": -32603, "message": "Internal error", "data": {"details": "thread x already has an active writer"}}
    held = hold(talk, [start(loadSession=True), failed(busy, 2)])
    assert held.error is not None
    assert held.error.kind is ErrorKind.TRANSIENT


@pytest.mark.parametrize(
    ("call", "capabilities", "method"),
    [
        (Call(NOWHERE, "x", resume=True), {"loadSession": True}, "session/load"),
        (Call(NOWHERE, "x", resume=True), {"sessionCapabilities": {"resume": {}}}, "session/resume"),
        (
            Call(NOWHERE, "x", resume=True),
            {"loadSession": True, "sessionCapabilities": {"resume": {}}},
            "session/resume",
        ),
        (
            Call(NOWHERE, "x", resume=True),
            {"loadSession": True, "sessionCapabilities": {"resume": None}},
            "session/load",
        ),
        (Call(NOWHERE, "x", resume=True), {"sessionCapabilities": []}, None),
        (Call(NOWHERE, None, resume=True), {"loadSession": True}, None),
        (Call(NOWHERE, forks="x"), {"sessionCapabilities": {"fork": {}}}, "session/fork"),
        (Call(NOWHERE, forks="x"), {"loadSession": True}, None),
    ],
)
def test_a_session_is_opened_as_the_agent_is_able_to(call: Call, capabilities: Any, method: str | None) -> None:
    held = hold(Talk(call, AIMS, lambda: NOW), [start(**capabilities)])
    if method is None:
        assert held.error is not None
        assert held.error.kind is ErrorKind.SESSION_LOST
    else:
        assert held.methods == ["initialize", method]
        assert held.said[1]["params"] == {"sessionId": "x", "cwd": AIMS.cwd, "mcpServers": []}


def test_a_prompt_that_never_got_into_the_session_is_found_out() -> None:
    def load(*heard: str) -> Held:
        aims = replace(AIMS, prompt="go on", holds=("Please  work\nhard", "go on"))
        talk = Talk(Call(NOWHERE, "x", resume=True), aims, lambda: NOW)
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
    ("offers", "aims", "said"),
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
        ({}, {"mode": "b"}, [("session/set_mode", {"modeId": "b"})]),
    ],
)
def test_model_and_mode_are_set_as_the_agent_offers_them(offers: Any, aims: Any, said: Any) -> None:
    opened = {"id": 2, "result": {"sessionId": "s-1", **offers}}
    held = hold(
        new_talk(**aims), [start(), opened, {"id": 5, "result": {}}, {"id": 6, "result": {}}, chunk("x"), done()]
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
    assert not held.error.goes_on


def test_an_agent_of_another_version_is_not_talked_to() -> None:
    began = start()
    began["result"]["protocolVersion"] = 2
    held = hold(new_talk(), [began])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST
    assert held.methods == ["initialize"]


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
    assert first.talk.wish is not None
    grant = Grant(first.talk.wish.deed, "Yes (o2)")

    def outcome(**raw: str) -> tuple[Any, Any]:
        held = hold(new_talk(permissions="ask", grant=grant), [start(), OPEN, ask("x", **raw)])
        return held.said[-1]["result"]["outcome"].get("optionId"), held.talk.wish

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
    assert held.answered.denied == ("touch x",)
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
    held = hold(new_talk(), [start(), OPEN, chunk("half")], Ending(-9, "it said why"))
    assert held.error is not None
    assert (held.error.kind, held.error.goes_on) == (ErrorKind.CRASHED, True)
    assert "SIGKILL" in held.error.message
    held = hold(new_talk(), [], Ending(127, "cannot start goose: No such file or directory"))
    assert held.error is not None
    assert "cannot start goose" in held.error.message
    assert not held.error.goes_on


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    [
        "id",
        "method",
        "params",
        "result",
        "error",
        "update",
        "sessionUpdate",
        "sessionId",
        "content",
        "text",
        "code",
        "options",
        "toolCall",
        "rawInput",
        "usage",
        "_meta",
        "agentCapabilities",
        "models",
        "availableModels",
        "cost",
        "sessionCapabilities",
        "protocolVersion",
        "agentInfo",
        "configOptions",
        "stopReason",
        "title",
        "data",
        "kind",
    ]
)
words = st.sampled_from(
    [
        "session/update",
        "session/request_permission",
        "agent_message_chunk",
        "tool_call",
        "usage_update",
        "s-1",
        "user_message_chunk",
        "end_turn",
        "model",
        "mode",
        "allow_once",
    ]
)
odd_values = st.recursive(
    json_values | words | st.integers(0, 8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=20,
)
odd_messages = st.dictionaries(keys, odd_values, max_size=5)


@settings(max_examples=80, deadline=None)
@given(st.lists(odd_messages, max_size=6), st.integers(0, 3), st.sampled_from(["allow", "deny", "ask"]))
def test_no_message_breaks_it(messages: list[Any], at: int, policy: Any) -> None:
    whole = [start(loadSession=True), OPEN, chunk("x"), done()]
    held = hold(new_talk(permissions=policy, model="m"), [*whole[:at], *messages, *whole[at:]])
    assert held.error is not None or held.answered is not None
    assert len({name_of(message) for message in held.said}) == len(held.said)
    for message in held.said:
        json.dumps(message).encode()
