from __future__ import annotations

from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest

from plait.backends import AnthropicBackend, ConversationRequest, Message, Output, Usage
from plait.backends.models.anthropic_api import native_schema
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.wire import Messages, Script, events, plain, serve

WIRE = Messages()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}},
    "required": ["n"],
    "additionalProperties": False,
}


def make(server: Script, **options: object) -> AnthropicBackend:
    return AnthropicBackend("m", base_url=server.url, **options)  # type: ignore[arg-type]


async def say(backend: AnthropicBackend, prompt: str = "Hello.", request: ConversationRequest | None = None):
    async with backend.open(request or ConversationRequest()) as conversation:
        return await conversation.send(prompt)


async def test_a_turn_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k-1")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "not-to-be-sent")
    seen: list[Output] = []
    async with serve(events(WIRE.parts("Good ", "day."))) as server:
        backend = make(server, api_key_env="SOME_KEY", system="Be brief.", temperature=0.5, max_tokens=9)
        reply = await say(backend, request=ConversationRequest(on_output=seen.append))
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert (request.headers["x-api-key"], request.headers["anthropic-version"]) == ("k-1", "2023-06-01")
    assert "not-to-be-sent" not in str(request.headers)
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello."}],
        "system": "Be brief.",
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert reply.text == "Good day."
    assert [output.text for output in seen] == ["Good ", "day."]
    assert reply.usage == Usage(11, 7, model="m", cache_read_tokens=3), "tokens from the prompt cache count as input"
    assert reply.messages == (
        Message("user", "Hello."),
        Message("assistant", "Good day.", Usage(11, 7, model="m", cache_read_tokens=3)),
    )


async def test_history_without_what_the_api_refuses() -> None:
    history = (Message("system", "Be kind."), Message("user", "a"), Message("assistant", ""), Message("user", "b"))
    async with serve(events(WIRE.parts("x"))) as server:
        await say(make(server, system="Be brief."), "c", ConversationRequest(history=history))
    body = server.bodies[0]
    assert body["system"] == "Be brief.\n\nBe kind."
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("user", "a"),
        ("user", "b"),
        ("user", "c"),
    ]


async def test_schema_as_far_as_the_api_can_express_it() -> None:
    async with serve(events(WIRE.parts('{"n": 3}'))) as server:
        reply = await say(make(server), request=ConversationRequest(output_schema=SCHEMA))
    wanted = server.bodies[0]["output_config"]["format"]
    assert wanted["type"] == "json_schema"
    assert wanted["schema"]["properties"]["n"]["type"] == "integer"
    assert "minimum" not in wanted["schema"]["properties"]["n"]
    assert reply.data == {"n": 3}


async def test_effort_and_cache_go_beside_the_schema() -> None:
    extra = {"output_config": {"effort": "low"}, "cache_control": {"type": "ephemeral"}}
    async with serve(events(WIRE.parts('{"n": 3}')), events(WIRE.parts("x"))) as server:
        backend = make(server, extra=extra)
        assert (await say(backend, request=ConversationRequest(output_schema=SCHEMA))).data == {"n": 3}
        await say(backend)
    first, second = server.bodies
    assert (first["output_config"]["effort"], first["output_config"]["format"]["type"]) == ("low", "json_schema")
    assert second["output_config"] == {"effort": "low"}
    assert first["cache_control"] == second["cache_control"] == {"type": "ephemeral"}


async def test_what_the_api_cannot_express_is_checked_here() -> None:
    async with serve(events(WIRE.parts('{"n": 0}')), events(WIRE.parts('{"n": 1}'))) as server:
        reply = await say(make(server), request=ConversationRequest(output_schema=SCHEMA))
    assert reply.data == {"n": 1}
    assert reply.usage == Usage(22, 14, model="m", cache_read_tokens=6)
    assert "0 is less than the minimum of 1" in reply.messages[2].content


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"type": "array", "items": {"type": "object"}},
        {"type": ["object", "null"], "properties": {"a": {}}},
        {"minLength": 1},
    ],
)
async def test_schemas_beyond_the_api_are_asked_for_in_words(schema: dict[str, Any]) -> None:
    async with serve(events(WIRE.parts('{"key": "value"}'))) as server:
        with_schema = ConversationRequest(output_schema=schema)
        if schema.get("type") == "array":
            with pytest.raises(BackendError) as caught:
                await say(make(server), request=with_schema)
            assert caught.value.kind is ErrorKind.INVALID_OUTPUT
        else:
            assert (await say(make(server), request=with_schema)).data == {"key": "value"}
    assert "output_config" not in server.bodies[0]
    assert "JSON Schema" in server.bodies[0]["system"]


TEXT = {"type": "string"}
LEAF = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
REFERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"definitions": {"N": TEXT}, "type": "object", "properties": {"a": {"$ref": "#/definitions/N"}}},
        {"type": "object", "properties": {"a": TEXT, "b": {"$ref": "#/properties/a"}}},
        {"$defs": {"N": REFERS}, **REFERS},
        {"type": "object", "properties": {"a": TEXT, "inner": {"$ref": "#"}}},
        {"$defs": {"N": LEAF}, "$ref": "#/$defs/N", "properties": {"b": TEXT}},
        {"type": "array", "items": {"allOf": [LEAF, {"type": "object", "properties": {"b": TEXT}}]}},
        {**LEAF, "additionalProperties": TEXT},
        {**LEAF, "additionalProperties": True},
        {**LEAF, "patternProperties": {"^x": TEXT}},
        {**LEAF, "not": {"required": ["b"]}},
        {**LEAF, "if": {"required": ["b"]}, "then": {"required": ["c"]}},
        {**LEAF, "anyOf": [{"type": "object", "properties": {"b": TEXT}}]},
        {"anyOf": [TEXT, {**LEAF, "oneOf": [LEAF]}]},
    ],
)
async def test_schemas_that_the_api_would_break_or_narrow_are_asked_for_in_words(schema: dict[str, Any]) -> None:
    async with serve(events(WIRE.parts('{"a": "x"}'))) as server:
        with suppress(BackendError):  # the answer does not fit all of them
            await say(make(server), request=ConversationRequest(output_schema=schema))
    assert "output_config" not in server.bodies[0]
    assert "JSON Schema" in server.bodies[0]["system"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"N": LEAF}, "$ref": "#/$defs/N"},
        {"$defs": {"N": {"anyOf": [LEAF, TEXT]}, "M": {"$ref": "#/$defs/N"}}, "anyOf": [LEAF, {"$ref": "#/$defs/M"}]},
        {"type": "object", "properties": {"a": TEXT, "not": TEXT, "if": LEAF, "definitions": TEXT, "$ref": TEXT}},
        {"type": "object", "properties": {"a": {"enum": ["x", "allOf"], "default": "x"}}},
    ],
)
async def test_schemas_that_the_api_keeps_are_given_to_it(schema: dict[str, Any]) -> None:
    async with serve(events(WIRE.parts('{"a": "x"}'))) as server:
        reply = await say(make(server), request=ConversationRequest(output_schema=schema))
    assert reply.data == {"a": "x"}
    assert jsonschema_rs.is_valid(server.bodies[0]["output_config"]["format"]["schema"], reply.data)
    assert "system" not in server.bodies[0]


TOO_MUCH = "max_tokens: 16384 > 4096, which is the maximum allowed number of output tokens for claude-3-haiku-20240307"


async def test_a_model_that_cannot_write_as_much_as_max_tokens_allows() -> None:
    async with serve(WIRE.error(400, "invalid_request_error", TOO_MUCH)) as server:
        with pytest.raises(BackendError, match=TOO_MUCH) as caught:
            await say(make(server))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert [body["max_tokens"] for body in server.bodies] == [16_384]


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("max_tokens", ErrorKind.TRUNCATED, "after 7 tokens: the backend's `max_tokens: 7` is reached; raise it"),
        ("model_context_window_exceeded", ErrorKind.TRUNCATED, "after 7 tokens: the model's context"),
        ("refusal", ErrorKind.REFUSED, "declined"),
        ("tool_use", ErrorKind.INVALID_OUTPUT, "'tool_use'"),
        ("pause_turn", ErrorKind.TRANSIENT, "'pause_turn'"),
    ],
)
async def test_stop_reasons(reason: str, kind: ErrorKind, words: str) -> None:
    async with serve(events(WIRE.parts("so far", reason=reason))) as server:
        with pytest.raises(BackendError, match=words) as caught:
            await say(make(server, max_tokens=7))
    assert caught.value.kind is kind


async def test_anthropic_itself_insists_on_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    with pytest.raises(BackendUnavailable, match="set ANTHROPIC_API_KEY"):
        await say(AnthropicBackend())


WHOLE = {
    "type": "message",
    "model": "big",
    "content": [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "all "},
        {"type": "text", "text": "of it"},
    ],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 2},
}


async def test_an_answer_in_one_piece() -> None:
    async with serve(plain(200, WHOLE), plain(200, {**WHOLE, "stop_reason": "max_tokens"})) as server:
        reply = await say(make(server))
        assert (reply.text, reply.usage) == ("all of it", Usage(9, 2, model="big", cache_read_tokens=4))
        with pytest.raises(BackendError) as caught:
            await say(make(server))
    assert caught.value.kind is ErrorKind.TRUNCATED


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "integer", "minimum": 1, "title": "A"},
         {"type": "integer", "title": "A", "description": "{minimum: 1}"}),
        ({"type": "string", "enum": ["a", None]}, {"enum": ["a", None]}),
        ({"oneOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
         {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]}),
        ({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2},
         {"type": "array", "items": {"type": "number"}, "minItems": 1, "description": "{maxItems: 2}"}),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
         {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False, "required": ["a"]}),
        ({"type": "text"}, None),
        ({"type": "array", "items": [{"type": "string"}]}, None),
    ],
)  # fmt: skip
def test_the_part_of_a_schema_that_the_api_supports(schema: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert native_schema(schema) == wanted
