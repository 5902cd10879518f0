"""No message of an agent that speaks ACP breaks the machine that holds a turn."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.agents.acp_machine import name_of
from tests.support.agents.acp_talks import (
    OPEN,
    chunk,
    done,
    hold,
    new_talk,
    start,
)

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


@settings(max_examples=40)
@given(st.lists(odd_messages, max_size=6), st.integers(0, 3), st.sampled_from(["allow", "deny", "ask"]))
def test_no_message_breaks_it(messages: list[Any], at: int, policy: Any) -> None:
    whole = [start(loadSession=True), OPEN, chunk("x"), done()]
    held = hold(new_talk(permissions=policy, model="m"), [*whole[:at], *messages, *whole[at:]])
    assert held.error is not None or held.answered is not None
    assert len({name_of(message) for message in held.said}) == len(held.said)
    for message in held.said:
        json.dumps(message).encode()
