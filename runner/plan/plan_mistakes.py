"""Errors of pydantic in plain words: the mistake, the value and the remedy; and a plan repaired for further checks."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from plait.backends.agents.agent_catalog import ACP_AGENTS
from plait.backends.specs.backend_spec import RatePart
from plait.errors import PlanProblem
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest
from plait.runner.plan.plan_models import (
    GIVEN_BY,
    SPEC_CLASSES,
    ChainPart,
    DefaultsPart,
    FilesInput,
    FollowUpPart,
    GrowthPart,
    OrchestratePart,
    PlanPart,
    PricePart,
    RequiredInput,
    RetryPart,
    RowsInput,
    StepPart,
    TaskPart,
    input_kind,
)
from plait.runner.plan.plan_positions import Path, Source

_KINDS_OF_VALUES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
}
_ENTRIES: dict[tuple[object, ...], type[BaseModel]] = {
    (): PlanPart,
    ("defaults",): DefaultsPart,
    ("growth",): GrowthPart,
    ("orchestrate",): OrchestratePart,
    ("workflow",): StepPart,
    ("tasks",): TaskPart,
    ("follow_ups",): ChainPart,
    ("follow_ups", "steps"): FollowUpPart,
}
"""Models of mappings by path, without indexes."""
_BY_KEY: dict[object, type[BaseModel]] = {"limits": RatePart, "retry": RetryPart}
"""Models of further mappings, by key."""
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, source: Source) -> list[PlanProblem]:
    """Return the problems in `error` with their positions in `source`."""
    return [source.problem(path, words, at_key=at_key) for path, words, at_key in findings(error, source.value)]


def findings(error: ValidationError, whole: object) -> Iterator[tuple[Path, str, bool]]:
    """Yield each finding of `error` about `whole`: path, message, and whether the key itself is the mistake. A missing
    key that is there misspelt is no finding of its own.
    """
    found: list[tuple[Path, str, str]] = []
    for finding in error.errors(include_url=False):
        path, kind = real_path(finding["loc"]), finding["type"]
        if kind == "union_tag_invalid":
            path = (*path, "kind")
        found.append((path, _message(kind, path, finding, whole), kind))
    unknown = [(path[:-1], message) for path, message, kind in found if kind == "extra_forbidden"]
    for path, message, kind in found:
        hint = f"did you mean {path[-1]!r}?" if path else ""
        if kind != "missing" or not any(beside == path[:-1] and hint in said for beside, said in unknown):
            yield path, message, kind == "extra_forbidden"


def describe(value: object) -> str:
    """Return a short description of `value` for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return "a list" if isinstance(value, list) else "a mapping"


def in_folder(name: str, folder: FilePath) -> str:
    """Return the location of the file or pattern `name`, relative to `folder` unless absolute, for messages."""
    return repr(name) if FilePath(name).is_absolute() else f"{name!r} in {folder.resolve()}"


def real_path(loc: Path) -> Path:
    """Return `loc` without the names of union members, inserted by pydantic after the key of the entry and after
    `base_url`.
    """
    if len(loc) <= 2 or loc[0] not in {"inputs", "backends"}:
        return loc
    inside = loc[3:]
    return (*loc[:2], *inside[:1], *(inside[2:] if inside[0:1] == ("base_url",) else inside[1:]))


def _message(kind: str, path: Path, finding: Any, whole: object) -> str:
    value = finding["input"]
    context: dict[str, Any] = finding.get("ctx", {})
    if kind in _KINDS_OF_VALUES:
        return _wrong_kind(_KINDS_OF_VALUES[kind], value)
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {context[key]:g}, not {value if isinstance(value, int | float) else describe(value)}"
    words_by_kind: dict[str, Callable[[], str]] = {
        "string_unicode": lambda: f"must be text without lone surrogates, not {describe(value)}",
        "missing": lambda: f"{path[-1]!r} is missing; add it",
        "extra_forbidden": lambda: (
            "'workflows' is now called 'follow_ups'"
            if path == ("workflows",)
            else _unknown_key(str(path[-1]), model_at(path[:-1], whole))
        ),
        "literal_error": lambda: _literal(str(context["expected"]), value),
        "value_error": lambda: str(context["error"]),
        "union_tag_not_found": lambda: f"'kind' is missing; add one of {', '.join(SPEC_CLASSES)}",
        "union_tag_invalid": lambda: _unknown_kind(context["tag"]),
        "too_short": lambda: f"has {len(value)} entries, and needs at least {context['min_length']}",
        "too_long": lambda: f"has {len(value)} entries, and at most {context['max_length']} are allowed",
        "string_pattern_mismatch": lambda: _does_not_fit(path, value, whole),
    }
    if kind in words_by_kind:
        return words_by_kind[kind]()
    message: str = finding["msg"]
    return f"{message[:1].lower()}{message[1:]}, not {describe(value)}"


def _wrong_kind(wanted: str, value: object) -> str:
    hint = ""
    if wanted == "text" and isinstance(value, bool | int | float):
        hint = f"; put it in quotes: {json.dumps(json.dumps(value))}"
    elif wanted != "text" and isinstance(value, str) and re.fullmatch(r"-?[0-9.]+", value):
        hint = "; write it without quotes and without leading or trailing zeros"
    elif wanted == "a list" and isinstance(value, str | int | float):
        hint = "; write it as [...] or as lines that start with '- '"
    return f"must be {wanted}, not {describe(value)}{hint}"


def _literal(expected: str, value: object) -> str:
    allowed = re.findall(r"'([^']*)'", expected)
    return _not_one_of(allowed, value) if allowed else f"must be {expected.lower()}, not {describe(value)}"


def _not_one_of(allowed: list[str], value: object) -> str:
    hint = nearest(value, allowed) if isinstance(value, str) else ""
    return f"must be one of {', '.join(allowed)}, not {describe(value)}{hint}"


def _unknown_kind(kind: str) -> str:
    if kind in ACP_AGENTS:
        return f"{kind!r} is an agent of `kind: acp`; write `kind: acp` and `agent: {kind}`"
    return _not_one_of(list(SPEC_CLASSES), kind)


def _unknown_key(key: str, model: type[BaseModel] | None) -> str:
    known = list(model.model_fields) if model else []
    if hint := nearest(key, known):
        return f"unknown key {key!r}{hint}"
    advice = f"there are {', '.join(known)}" if known else "remove it"
    return f"unknown key {key!r}; {advice}"


def _does_not_fit(path: Path, value: object, whole: object) -> str:
    key = path[:-1] if isinstance(path[-1], int) else path  # an element of a list is described with its list
    model = model_at(key[:-1], whole)
    description = model.model_fields[str(key[-1])].description if model else None
    # A refused URL may hold a password.
    what = "a URL with a user or password" if key[-1] == "base_url" and "@" in str(value) else describe(value)
    return f"{what} does not fit. {' '.join((description or '').split())}".rstrip(". ")


def model_at(path: Path, whole: object) -> type[BaseModel] | None:
    """Return the model of the mapping at `path`; None if unknown."""
    if model := _ENTRIES.get(tuple(part for part in path if not isinstance(part, int))):
        return model
    match path:
        case ("prices", _):
            return PricePart
        case ("backends", _):
            return SPEC_CLASSES.get(str(_value_at((*path, "kind"), whole)))
        case ("inputs", _):
            shapes: dict[str, type[BaseModel]] = {"files": FilesInput, "rows": RowsInput}
            return shapes.get(input_kind(_value_at(path, whole)), RequiredInput)
        case _:
            return _BY_KEY.get(path[-1])


def _value_at(path: Path, value: Any) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


_ROUNDS = 3  # a corrected key may turn out to have a wrong value


def salvage(value: JsonValue, error: ValidationError) -> tuple[PlanPart | None, set[int]]:
    """Return a repaired plan, if possible, and the indexes of tasks whose dependencies were lost."""
    whole: Any = copy.deepcopy(value)
    lost: set[int] = set()
    for _ in range(_ROUNDS):
        if not any(isinstance(whole.get(key), list | dict) for key in GIVEN_BY):
            return None, lost
        # Backwards, to keep the indexes of the remaining findings valid.
        for finding in reversed(error.errors(include_url=False, include_input=False)):
            _mend(whole, real_path(finding["loc"]), finding["type"], lost)
        try:
            return PlanPart.model_validate(whole), lost
        except ValidationError as next_error:
            error = next_error
    return None, lost


def _mend(whole: Any, path: tuple[str | int, ...], kind: str, lost: set[int]) -> None:
    match path:
        case ("tasks", int() as index, *rest):
            lost |= {index} if rest[:1] in (["depends_on"], ["continues"]) else set()
            _mend_part(whole["tasks"], index, rest, {"id": f"task-{index}-of-the-plan", "prompt": "?"}, TaskPart, kind)
        case ("workflow", int() as index, *rest):
            _mend_part(whole["workflow"], index, rest, {"name": "a-step-of-the-plan", "prompt": "?"}, StepPart, kind)
        case ("orchestrate", *rest) if rest:
            _mend_part(whole, "orchestrate", rest, {"goal": "the goal"}, OrchestratePart, kind)
        case ("inputs", name, *_):
            whole["inputs"][name] = None
        case ("backends", name, *_):
            whole["backends"][name] = {"kind": "function", "call": "module:function"}
        case (name, *_):
            _take_out(whole, str(name), PlanPart)
        case _:
            pass


def _mend_part(
    owner: Any, place: Any, rest: list[str | int], needed: Mapping[str, str], model: type[BaseModel], kind: str
) -> None:
    """Repair the part at `place` of `owner` with the values of `needed`; replace what is no mapping."""
    part: Any = owner[place]
    if not rest or not isinstance(part, dict):
        owner[place] = dict(needed)
    elif (key := str(rest[0])) not in needed:
        _take_out(part, key, model)  # pyright: ignore[reportUnknownArgumentType]
    elif not (len(rest) == 1 and kind == "missing" and cast("dict[str, Any]", part).get(key)):
        # A value that stands there was moved from a misspelt key.
        part[key] = needed[key]


def _take_out(mapping: dict[str, Any], key: str, model: type[BaseModel]) -> None:
    """Remove `key`. The value of a misspelt key moves to the correct key."""
    value = mapping.pop(key, None)
    known = model.model_fields
    close = difflib.get_close_matches(key, known, n=1)
    if key not in known and close and close[0] not in mapping:
        mapping[close[0]] = value
