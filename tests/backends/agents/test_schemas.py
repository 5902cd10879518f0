"""Schemas that an agent's program does not take are asked for in words, and never fail a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.backends import ClaudeCodeBackend, Output
from plait.backends.agents.agent_output import AgentCall, ProcessEnd, SchemaRefused
from tests.support.agents.homes import Home, send

PAIR = {"type": "object", "properties": {"pair": {"type": "array", "prefixItems": [{"type": "integer"}]}}}
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_words_of_a_schema_that_claude_code_refuses_are_told_in_the_prompt(home: Home) -> None:
    shown: list[Output] = []
    backend = home.claude()
    files, session = home.files(), backend.new_session_id()
    prompt = '[[say {"pair": [1]}]]'
    reply = await send(backend, prompt, output_schema=PAIR, files=files, session_id=session, on_output=shown.append)
    assert (reply.data, reply.session_id) == ({"pair": [1]}, session)
    assert [message.content for message in reply.messages] == [prompt, '{"pair": [1]}']
    assert len(home.prompts) == 1 and "prefixItems" in home.prompts[0]
    assert [one.text for one in shown if one.kind == "notice"] == [
        "the schema was rejected, so the prompt describes it: Claude Code: Error: "
        "--json-schema is not a valid JSON Schema: "
        'strict mode: unknown keyword: "prefixItems"'
    ]


async def test_claude_code_is_not_told_which_version_a_schema_is_of(home: Home) -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **OPEN}
    reply = await send(home.claude(), 'Say it. [[json {"a": 1}]]', output_schema=schema)
    assert reply.data == {"a": 1}
    assert home.prompts == ['Say it. [[json {"a": 1}]]']


@pytest.mark.parametrize(
    ("schema", "takes"),
    [
        (OPEN, True),
        ({"type": "array", "items": {"type": "integer"}}, False),
        ({"enum": ["a", "b"]}, False),
        ({"type": ["object", "null"]}, False),
        ({"properties": {"a": {}}}, False),
        ({**OPEN, "anyOf": [{"required": ["a"]}]}, False),
        ({**OPEN, "oneOf": [{"required": ["a"]}]}, False),
        ({**OPEN, "allOf": [{"required": ["a"]}]}, False),
        ({"type": "object", "properties": {"a": {"anyOf": [OPEN, {"type": "null"}]}}}, True),
        ({**OPEN, "description": "ä" * 50_000}, False),  # no argument may be that long
        ({}, False),
    ],
)
def test_claude_code_is_given_the_schemas_that_its_server_takes_for_a_tool(schema: dict[str, Any], takes: bool) -> None:
    assert ClaudeCodeBackend().takes_schema(schema) is takes


def test_a_schema_that_the_server_refuses_is_told_in_words_too() -> None:
    reader = ClaudeCodeBackend().reader(AgentCall(Path("/nowhere"), output_schema=OPEN))
    said = "API Error: 400 tools.7.custom.input_schema: JSON schema is invalid"
    result = {"type": "result", "subtype": "success", "is_error": True, "api_error_status": 400, "result": said}
    reader.read(json.loads(json.dumps(result)))
    with pytest.raises(SchemaRefused, match="input_schema"):
        reader.end(ProcessEnd(1))
