"""Errors of pydantic in plain words: the mistake, the value and the remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from plait.backends.agents.agent_catalog import ACP_AGENTS
from plait.backends.backend_specs import DescribedModel
from plait.errors import nearest
from plait.runner.plan.plan_models import CLASSES, INPUT_CLASSES, PlanPart, input_kind, keys_of
from plait.runner.plan.plan_positions import Source, Where, value_at

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
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, source: Source) -> None:
    """Add the mistakes in `error` to those of `source`. What its reader refused is missing, and reported already."""
    refused = source.wrong
    for path, message, at_key in findings(error, source.value):
        if path not in refused:
            source.complain(path, message, at_key=at_key)


def findings(error: ValidationError, whole: object) -> Iterator[tuple[Where, str, bool]]:
    """Yield each finding of `error` about `whole`: path, message, and whether the key itself is the mistake. A missing
    key that is there misspelt is no finding of its own.
    """
    entries: list[tuple[Where, str, str]] = []
    misspelt: set[Where] = set()
    for finding in error.errors(include_url=False):
        path, kind = real_path(finding["loc"]), finding["type"]
        if kind == "union_tag_invalid":
            path = (*path, "kind")
        if kind == "extra_forbidden" and (model := model_at(path[:-1], whole)):
            close = difflib.get_close_matches(str(path[-1]), keys_of(model), n=1)
            misspelt |= {(*path[:-1], key) for key in close}
        entries.append((path, _message(kind, path, finding, whole), kind))
    for path, message, kind in entries:
        if kind != "missing" or path not in misspelt:
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


def in_folder(name: str, folder: Path) -> str:
    """Return the location of the file or pattern `name`, relative to `folder` unless absolute, for messages."""
    return repr(name) if Path(name).is_absolute() else f"{name!r} in {folder.resolve()}"


def real_path(loc: Where) -> Where:
    """Return `loc` without the names of union members, inserted by pydantic after the key of the entry and after
    `base_url`.
    """
    if len(loc) <= 2 or loc[0] not in {"inputs", *CLASSES}:
        return loc
    inside = loc[3:]
    return (*loc[:2], *inside[:1], *(inside[2:] if inside[0:1] == ("base_url",) else inside[1:]))


def _message(kind: str, path: Where, finding: Any, whole: object) -> str:
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
        "extra_forbidden": lambda: _unknown_key(str(path[-1]), model_at(path[:-1], whole)),
        "literal_error": lambda: _literal(str(context["expected"]), value),
        "value_error": lambda: str(context["error"]),
        "union_tag_not_found": lambda: f"'kind' is missing; add one of {', '.join(CLASSES[str(path[0])])}",
        "union_tag_invalid": lambda: _unknown_kind(context["tag"], CLASSES[str(path[0])]),
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


def _unknown_kind(kind: str, kinds: Iterable[str]) -> str:
    if kind in ACP_AGENTS:
        return f"{kind!r} is an agent of `kind: acp`; write `kind: acp` and `agent: {kind}`"
    return _not_one_of(list(kinds), kind)


def _unknown_key(key: str, model: type[DescribedModel] | None) -> str:
    keys = list(keys_of(model)) if model else []
    if hint := nearest(key, keys):
        return f"unknown key {key!r}{hint}"
    advice = f"there are {', '.join(keys)}" if keys else "remove it"
    return f"unknown key {key!r}; {advice}"


def _does_not_fit(path: Where, value: object, whole: object) -> str:
    key = path[:-1] if isinstance(path[-1], int) else path  # an element of a list is described with its list
    model = model_at(key[:-1], whole)
    description = model.descriptions().get(str(key[-1])) if model else None
    # A refused URL may hold a password.
    what = "a URL with a user or password" if key[-1] == "base_url" and "@" in str(value) else describe(value)
    return f"{what} does not fit. {' '.join((description or '').split())}".rstrip(". ")


def model_at(path: Where, whole: object) -> type[DescribedModel] | None:
    """Return the model of the mapping at `path`; None if unknown."""
    model: type[DescribedModel] | None = PlanPart
    keys = list(path)
    match path:
        case ("backends" | "hosts" as key, _, *keys):
            model = CLASSES[key].get(str(value_at((*path[:2], "kind"), whole)))
        case ("inputs", _, *keys):
            model = INPUT_CLASSES.get(input_kind(value_at(path[:2], whole)))
        case _:
            pass
    while keys and model:
        name = keys.pop(0)
        if isinstance(name, str):
            annotation = model.model_fields[name].annotation if name in model.model_fields else None
            if get_origin(annotation) is dict and keys:
                keys.pop(0)
            model = _model_in(annotation)
    return model


def _model_in(annotation: Any) -> type[DescribedModel] | None:
    """Return the model of a field, or of the entries of its list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, DescribedModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
