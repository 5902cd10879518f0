"""The bounds on schemas and on answers: which ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field

from plait.backends import ConversationRequest, FunctionBackend
from plait.backends.output_schema import MAX_DEPTH, MAX_VALUES, schema_problem
from plait.errors import BackendError, ErrorKind
from tests.support.linear import check_linear

DATE = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
UUID = {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}
ID = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
IPV6 = {"pattern": "^(([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|([0-9a-f]{1,4}:){1,6}:[0-9a-f]{1,4}|(:[0-9a-f]{1,4}){1,5})$"}


class Part(BaseModel):
    name: str = Field(min_length=1, pattern=r"^[\w .-]{1,80}$")
    tags: list[str] = []
    parts: list[Part] = []


class Report(BaseModel):
    title: str
    best: Part
    worst: Part | None = None
    all: dict[str, Part] = Field(default={}, examples=[{"$ref": "nothing", "$id": "x", "id": "y"}])


async def read(answer: Any, schema: dict[str, Any]) -> Any:
    async def function(prompt: str) -> Any:
        return answer

    async with FunctionBackend(function).open(ConversationRequest(output_schema=schema)) as conversation:
        return (await conversation.send("?")).data


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"items": {"properties": {"day": DATE, "id": UUID}, "required": ["day"]}}, [{"day": "2026-11-25"}] * 100),
        (
            {"items": {"properties": dict.fromkeys("abcde", UUID)}},
            [dict.fromkeys("abcde", ID)] * 2_300,
        ),
        ({"properties": {"host": IPV6}}, {"host": "1:2:3:4:5:6:7:8"}),
        ({"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": {"type": "integer"}}}, 1),
        ({"properties": {"default": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "null"}}}, {"default": None}),
        ({"properties": {"$id": {"type": "string"}, "$ref": {"type": "string"}}}, {"$id": "x", "$ref": "y"}),
        (
            Report.model_json_schema(),
            {
                "title": "t",
                "best": {"name": "a", "parts": [{"name": f"b {n}", "parts": [{"name": "c"}]} for n in range(20)]},
            },
        ),
    ],
)
async def test_ordinary_answers_are_checked(schema: dict[str, Any], answer: Any) -> None:
    assert await read(answer, schema) == answer


def hidden(place: str) -> dict[str, Any]:
    """Return a schema whose costly part is reached through `place`, a keyword or a name."""
    fan: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
    return {"$defs": {**fan, "d30": {"type": "null"}}, "properties": {place: {"$ref": "#/$defs/d0"}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


CHAIN = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(MAX_DEPTH)}
# Counted from `b`, the reference in `a` that points back hides the size of `a`.
BACK: dict[str, Any] = {
    "$defs": {
        "b": {"anyOf": [{"$ref": "#/$defs/a"}]},
        "a": {"items": {"anyOf": [{"$ref": "#/$defs/b"}, {"enum": [*range(5_000)]}]}},
    },
    "$ref": "#/$defs/b",
}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (hidden("default"), "too costly to check"),
        (hidden("enum"), "too costly to check"),
        (hidden("$defs"), "too costly to check"),
        ({"$defs": hidden("x")["$defs"]}, "too costly to check"),
        ({"enum": [*range(MAX_VALUES)]}, "more than 20,000 values"),
        (nested(MAX_DEPTH + 1), "nested more than 200 levels"),
        ({"$ref": "#/$defs/d0", "$defs": {**CHAIN, f"d{MAX_DEPTH}": {}}}, "nested more than 200 levels"),
        ({"$defs": {"x": {"$id": "http://127.0.0.1/x", "type": "null"}}}, "inner schema cannot have an \\$id"),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "items": {"id": "x"}},
            "inner schema cannot have an id",
        ),
        ({"$defs": {"n": {"$anchor": "n"}}, "$ref": "#n"}, "only references like '#/\\$defs/name' work"),
        ({"pattern": "(a{300}){300}", "items": {"pattern": "(a{500}){500}"}}, "patterns are too large"),
        ({"pattern": "a{" + "9" * 5_000 + "}"}, "patterns are too large"),
        ({"patternProperties": {r"(\p{L}{20}){20}": True}}, "patterns are too large"),
        ({"pattern": "^(?!b)a+$"}, "patterns have no lookaround and no backreferences"),
        ({"patternProperties": {r"(a)\1": True}}, "patterns have no lookaround and no backreferences"),
        ({"patternProperties": 5}, "not a valid JSON Schema"),
    ],
)
async def test_schemas_that_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        await read("1", schema)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"items": {"enum": [*range(1_000)]}}, [1] * 40_000),
        ({"pattern": "^(a{1,100}){1,100}$"}, "a" * 40_000),
        ({"items": {"$ref": "#"}, "unevaluatedItems": {"unevaluatedItems": {"maxItems": 9}}}, [[]] * 1_200_000),
        (BACK, [[1]] * 4_000),
    ],
)
async def test_a_check_that_may_take_long_is_not_begun(schema: dict[str, Any], answer: Any) -> None:
    with pytest.raises(BackendError, match="checking it would take too long") as caught:
        await read(json.dumps(answer), schema)
    assert caught.value.kind is ErrorKind.INVALID_OUTPUT


@pytest.mark.parametrize("unit", ["[", "[a", "[\\", "\\p{", "\\p", "(", "{1", "a{9}", "\\"])
def test_a_pattern_is_measured_in_a_time_that_grows_with_its_length(unit: str) -> None:
    def of(pattern: str) -> None:
        schema_problem({"type": "string", "pattern": pattern})  # too large, or none

    check_linear(of, unit, 4000)
