"""Put the keys of each kind of backend, from plan.schema.json, in place of `<!-- kinds of backends -->` in a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MARKER = "<!-- kinds of backends -->"
_SCHEMA = Path(__file__).parent.parent / "plan.schema.json"


def reference() -> str:
    """Return one section of Markdown for each kind, with a row for each key."""
    definitions: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))["$defs"]
    kinds = {one["properties"]["kind"]["const"]: one for name, one in definitions.items() if name.endswith("Spec")}
    return "\n\n".join(_section(kind, kinds[kind]) for kind in sorted(kinds))


def _section(kind: str, definition: dict[str, Any]) -> str:
    needed = set(definition.get("required", ()))
    rows = [
        f"| `{key}` | {_type(value)} | {_default(value, key in needed)} | {_cell(value.get('description', ''))} |"
        for key, value in definition["properties"].items()
        if key != "kind"
    ]
    return "\n".join(
        [
            f"### kind: {kind}",
            "",
            definition["description"],
            "",
            "| key | type | default | |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(one) for one in value["anyOf"] if one.get("type") != "null"))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    names = {"object": "mapping", "string": "text", "null": "null", "boolean": "true or false"}
    return names.get(value.get("type", ""), value.get("type", "anything"))


def _default(value: dict[str, Any], needed: bool) -> str:
    if needed:
        return "needed"
    default = value.get("default")
    return "" if default is None else f"`{_cell(json.dumps(default))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - Sphinx passes both
    if MARKER in source[0]:
        source[0] = source[0].replace(MARKER, reference())


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}
