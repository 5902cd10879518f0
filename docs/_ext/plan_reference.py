"""Put the keys of a plan file and of its parts, as plan.schema.json describes them, into the page of plan files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from markers import replace_markers, table

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PARTS = {
    "keys of a plan": "",
    "keys of a task": "TaskPart",
    "keys of a retry policy": "RetryPart",
    "keys of the defaults": "DefaultsPart",
    "keys of an input of files": "FilesInput",
    "keys of an input of rows": "RowsInput",
    "keys of a needed input": "RequiredInput",
    "keys of growth": "GrowthPart",
    "keys of a goal": "OrchestratePart",
    "keys of a workflow's step": "StepPart",
    "keys of a chain": "ChainPart",
    "keys of a step": "FollowUpPart",
    "keys of an MCP server": "McpServerPart",
    "keys of limits": "RatePart",
    "keys of a group of hosts reached with OpenSSH": "SSHHostsPart",
    "keys of a group of hosts on a Dask cluster": "DaskHostsPart",
    "keys of a host": "HostPart",
    "keys of a price": "PricePart",
}
"""The definition of the schema behind each marker; empty for the schema itself."""
_SCHEMA = Path(__file__).parent.parent / "plan.schema.json"


def keys(part: str) -> str:
    """Return a table with a row for each key of the definition `part` of the schema."""
    schema = _schema()
    return _table(schema["$defs"][part] if part else schema)


def kinds() -> str:
    """Return one section of Markdown for each kind of backend, with a row for each key."""
    specs = {name: one for name, one in _schema()["$defs"].items() if name.endswith("Spec")}
    by_kind = {one["properties"].pop("kind")["const"]: one for one in specs.values()}
    sections = [(f"### kind: {kind}", by_kind[kind]["description"], _table(by_kind[kind])) for kind in sorted(by_kind)]
    return "\n\n".join("\n\n".join(section) for section in sections)


def _schema() -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(_SCHEMA.read_text(encoding="utf-8")))


def _table(definition: dict[str, Any]) -> str:
    # A part with a short form is one of several types; the keys are those of the mapping.
    definition = next((one for one in definition.get("anyOf", ()) if "properties" in one), definition)
    needed = set(definition.get("required", ()))
    rows = [
        (f"`{key}`", _type(value), _default(value, key in needed), _description(key, value))
        for key, value in definition["properties"].items()
    ]
    return table(["key", "type", "default", "meaning"], rows) if rows else "No key besides `kind`."


def _description(key: str, value: dict[str, Any]) -> str:
    if "description" not in value:
        raise ValueError(f"the key {key!r} has no description in plan.schema.json; write one in the model")
    return str(value["description"])


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(one) for one in value["anyOf"] if one.get("type") != "null"))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if "$ref" in value:
        return "mapping"
    names = {"object": "mapping", "string": "text", "null": "null", "boolean": "true or false"}
    return names.get(value.get("type", ""), str(value.get("type", "anything")))


def _default(value: dict[str, Any], needed: bool) -> str:
    if needed:
        return "needed"
    default = value.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def setup(app: Sphinx) -> dict[str, bool]:
    parts = {name: partial(keys, part) for name, part in PARTS.items()}
    return replace_markers(app, {**parts, "kinds of backends": kinds})
