"""The part of JSON Schema that Anthropic's API accepts as an output format, and the translation into the part. Pure.

The API wants each object closed, supports `anyOf` of the combining keywords, and refuses limits such as `minimum`. A
keyword that the API refuses moves into the description, as the vendor's own client does: the model may follow it, and
the answer is checked against the whole schema anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})


def native_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """Return `schema` in the part of JSON Schema supported by the API; None if that part cannot express the schema."""
    try:
        return _strict(schema) if _Expressible(schema).holds() else None
    except (AttributeError, RecursionError, TypeError, ValueError):  # a schema of another shape than JSON Schema's
        return None


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema` in the supported part. Raises ValueError for a schema that says no type."""
    rest = dict(schema)
    strict: dict[str, Any] = {}
    if "$defs" in rest:
        strict["$defs"] = {name: _strict(one) for name, one in rest.pop("$defs").items()}
    if "$ref" in rest:
        return {**strict, "$ref": rest["$ref"]}
    kind, literals = rest.pop("type", None), _take_literals(rest)
    variants = _variants(rest)
    if variants is not None:
        strict["anyOf"] = [_strict(one) for one in variants]
    elif literals:
        kind = None
    elif kind not in _TYPES:
        raise ValueError("the schema says no type")
    else:
        strict["type"] = kind
    strict |= literals
    strict |= {name: rest.pop(name) for name in ("description", "title") if rest.get(name) is not None}
    if not literals:
        strict |= _take_members(kind, rest)
    if rest:
        said = "{" + ", ".join(f"{name}: {value}" for name, value in rest.items()) + "}"
        strict["description"] = "\n\n".join(one for one in (strict.get("description"), said) if one)
    return strict


def _variants(rest: dict[str, Any]) -> Sequence[Any] | None:
    first: Sequence[Any] | None = rest.pop("anyOf", None)
    second: Sequence[Any] | None = rest.pop("oneOf", None)
    return second if first is None else first


def _take_literals(rest: dict[str, Any]) -> dict[str, Any]:
    """Return `enum` and `const` as far as they hold plain values, and remove them from `rest`."""
    found: dict[str, Any] = {}
    if isinstance(rest.get("enum"), list) and rest["enum"] and all(map(_is_plain, rest["enum"])):
        found["enum"] = rest.pop("enum")
    if "const" in rest and _is_plain(rest["const"]):
        found["const"] = rest.pop("const")
    return found


def _take_members(kind: object, rest: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for values of type `kind` that the API supports, and remove them from `rest`."""
    if kind == "object":
        rest.pop("additionalProperties", None)
        members: dict[str, Any] = {name: _strict(one) for name, one in rest.pop("properties", {}).items()}
        required = {"required": rest.pop("required")} if rest.get("required") is not None else {}
        return {"properties": members, "additionalProperties": False, **required}
    if kind == "string" and rest.get("format") in _FORMATS:
        return {"format": rest.pop("format")}
    if kind == "array":
        items = {"items": _strict(rest.pop("items"))} if "items" in rest else {}
        least = {"minItems": rest.pop("minItems")} if rest.get("minItems") in {0, 1} else {}
        return {**items, **least}
    return {}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


# Keywords without which the rest forbids values that the schema allows, or has a dangling reference.
_BEYOND = frozenset({"definitions", "$anchor", "patternProperties", "allOf", "if", "not"})
# Each object is closed, so at most one of these keywords may describe a value.
_SHAPES = frozenset({"properties", "anyOf", "oneOf", "$ref"})
_LOCAL = "#/$defs/"


class _Expressible:
    """Checks whether the API can be given a schema: the translation must neither break nor narrow the schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._defs: Mapping[str, Any] = schema.get("$defs") or {}
        self._open: list[str] = []
        self._good: set[str] = set()

    def holds(self) -> bool:
        return self._fits(self._schema) and all(map(self._refers_well, (_LOCAL + name for name in self._defs)))

    def _fits(self, schema: Mapping[str, Any]) -> bool:
        if _BEYOND & schema.keys() or len(_SHAPES & schema.keys()) > 1:
            return False
        if schema.get("additionalProperties", False) is not False:
            return False
        if schema.get("type") == "object" and not schema.get("properties"):
            return False  # an object with any keys, which would become an empty object
        return all(map(self._fits, _parts(schema))) and ("$ref" not in schema or self._refers_well(schema["$ref"]))

    def _refers_well(self, reference: str) -> bool:
        name = reference.removeprefix(_LOCAL)
        if name in self._good:
            return True
        if name == reference or name not in self._defs or name in self._open:
            return False
        self._open.append(name)
        fits = self._fits(self._defs[name])
        self._open.pop()
        self._good |= {name} if fits else set()
        return fits


def _parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the direct subschemas of `schema` that are passed to the API."""
    items = [schema["items"]] if "items" in schema else []
    return [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ()), *items]
