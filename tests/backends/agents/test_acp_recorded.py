"""The machine that holds a turn with an agent that speaks ACP, on what real agents said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.backends.agents.acp_machine import TurnGoals, prompt_of
from plait.errors import ErrorKind
from plait.usage import Usage
from tests.support.agents.acp_talks import (
    AIMS,
    RECORDED,
    hold,
    recorded_turns,
    talk_of,
)

ANSWERS = {
    "claude-agent-acp-0.100.0": ("STUB: 1 messages", "STUB: 5 messages", "STUB: 7 messages"),
    "codex-acp-2.6.0": ("STUB: 4 messages", "STUB: 8 messages", "STUB: 10 messages"),
    "goose-1.52.0": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
    "opencode-1.18.33": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
    "qwen-0.24.4": ("STUB: 2 messages", "STUB: 6 messages", "STUB: 8 messages"),
}
TOKENS = {
    "claude-agent-acp-0.100.0": (
        Usage(16, 7, 0.000279, cache_read_tokens=5),
        Usage(32, 14, 0.0006975, cache_read_tokens=10),
        Usage(16, 7, 0.000279, cache_read_tokens=5),
    ),
    "codex-acp-2.6.0": (
        Usage(11, 7, cache_read_tokens=5, reasoning_tokens=2),
        Usage(22, 14, cache_read_tokens=10, reasoning_tokens=4),
        Usage(11, 7, cache_read_tokens=5, reasoning_tokens=2),
    ),
    # These tell of a turn's last request alone.
    "goose-1.52.0": (Usage(11, 7), Usage(11, 7), Usage(11, 7)),
    "opencode-1.18.33": (Usage(11, 7, 0.0, cache_read_tokens=5),) * 3,
    "qwen-0.24.4": (
        Usage(11, 7, cache_read_tokens=5),
        Usage(22, 14, cache_read_tokens=10),
        Usage(11, 7, cache_read_tokens=5),
    ),
}
MODELS = {
    "claude-agent-acp-0.100.0": "claude-sonnet-4-5",
    "codex-acp-2.6.0": "stub-model",
    "goose-1.52.0": None,  # it does not say
    "opencode-1.18.33": "stub/stub-model",
    "qwen-0.24.4": "$runtime|openai|stub-model(openai)",
}


@pytest.mark.parametrize("agent", ANSWERS)
def test_what_the_real_agents_said(agent: str) -> None:
    held = [hold(talk_of(turn), turn.said) for turn in recorded_turns(agent)]
    assert [one.error for one in held] == [None] * 3
    answers = [one.answered for one in held if one.answered is not None]
    for answer, text in zip(answers, ANSWERS[agent], strict=True):
        assert answer.text.startswith(text)
    assert tuple(replace(answer.usage, model=None) for answer in answers) == TOKENS[agent]
    assert {answer.usage.model for answer in answers} == {MODELS[agent]}
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
    assert first.answered.usage == Usage(11, 7, model="gemini-2.5-flash")
    assert second.answered is not None
    assert second.answered.usage == Usage(22, 14, model="gemini-2.5-flash")
    third = hold(talk_of(turns[2]), turns[2].said)
    assert third.error is not None
    assert third.error.kind is ErrorKind.SESSION_LOST
    assert third.methods == ["initialize"]


@pytest.mark.parametrize("agent", ["claude-agent-acp-0.100.0", "gemini-0.61.0", "qwen-0.24.4"])
def test_permission_is_given_as_it_was_written_down(agent: str) -> None:
    turn = list(recorded_turns(agent))[1]

    def outcome(goals: TurnGoals) -> Any:
        held = hold(talk_of(turn, goals), turn.said)
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
        goals = replace(AIMS, permissions=policy)
        whole = hold(talk_of(turn, goals), turn.said)
        for count in range(len(whole.said) + 1):
            talk = talk_of(turn, goals)
            talk.restore_sent(whole.said[:count])
            again = hold(talk, turn.said)
            assert again.said == whole.said[count:]
            assert again.answered == whole.answered
            assert again.talk.session_id == whole.talk.session_id
