"""A model that answers everything: some text, or the smallest value that fits the schema that was asked for."""

from __future__ import annotations

import json
from typing import Any

from tests.support.wire import ChatCompletions, Dialect, Exchange, Messages, events, plain

_TEXT = "Short and to the point, as it was asked for."


async def oblige(exchange: Exchange) -> None:
    """Answer a request of either dialect, a request for the list of models, or spans."""
    request = exchange.request
    if request.path == "/v1/traces":
        await plain(200, {}, connection="close")(exchange)
        return
    if request.method == "GET":
        models = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "test"}]}
        await plain(200, models, connection="close")(exchange)
        return
    dialect: Dialect = Messages() if request.path.endswith("/messages") else ChatCompletions()
    schema = _schema(request.body)
    text = _TEXT if schema is None else json.dumps(fitting(schema))
    await events(dialect.parts(text[:5], text[5:]))(exchange)


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    if body.get("response_format", {}).get("type") == "json_schema":
        return body["response_format"]["json_schema"]["schema"]
    return body.get("output_config", {}).get("format", {}).get("schema")


def fitting(schema: dict[str, Any]) -> Any:
    """A value for the schemas that plans are written with."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return fitting(schema["anyOf"][0])
    match schema.get("type", "object"):
        case "object":
            parts = schema.get("properties", {})
            return {name: fitting(parts[name]) for name in schema.get("required", parts)}
        case "array":
            return [fitting(schema.get("items", {"type": "string"}))] * max(1, schema.get("minItems", 1))
        case "integer" | "number":
            return schema.get("minimum", schema.get("maximum", 1))
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return _TEXT[: schema.get("maxLength", len(_TEXT))].ljust(schema.get("minLength", 0), ".")
