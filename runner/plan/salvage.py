"""Makes a plan with mistakes in its shape good enough to look for mistakes in its graph.

Nothing that comes out of here is ever run: it serves to report both kinds of mistakes at once. What is wrong is
replaced by what was probably meant, so that one mistake is not reported twice.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from plait.runner.domain.task import JsonValue
from plait.runner.plan.messages import model_at, real_path
from plait.runner.plan.schema import PlanPart

_ROUNDS = 3  # a key put right may turn out to hold a wrong value


def salvage(value: JsonValue, error: ValidationError) -> tuple[PlanPart | None, set[int]]:
    """A plan that fits the model, or None, and the indexes of tasks whose dependencies were lost on the way."""
    whole: Any = copy.deepcopy(value)
    lost: set[int] = set()
    for _ in range(_ROUNDS):
        if not isinstance(whole.get("tasks"), list):
            return None, lost
        # From the back, so that the indexes of what is still to be mended stay right.
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
            _mend_task(whole, index, [str(part) for part in rest], kind, lost)
        case ("inputs", name, *_):
            whole["inputs"][name] = None
        case ("backends", name, *_):
            whole["backends"][name] = {"kind": "function", "call": "module:function"}
        case (name, *_):
            _take_out(whole, str(name), PlanPart)
        case _:
            pass


def _mend_task(whole: Any, index: int, rest: list[str], kind: str, lost: set[int]) -> None:
    task = whole["tasks"][index]
    if not rest or not isinstance(task, dict):
        whole["tasks"][index] = {"id": f"task-{index}-of-the-plan", "prompt": ""}
    elif rest[0] == "id":
        task["id"] = f"task-{index}-of-the-plan"
    elif rest[0] == "prompt":
        task["prompt"] = ""
    elif kind == "extra_forbidden" and len(rest) == 1:
        _take_out(task, rest[0], model_at(("tasks", index), whole))  # pyright: ignore[reportUnknownArgumentType]
    else:
        if rest[0] in {"depends_on", "continues"}:
            lost.add(index)
        task.pop(rest[0], None)  # pyright: ignore[reportUnknownMemberType]


def _take_out(mapping: dict[str, Any], key: str, model: type[BaseModel] | None) -> None:
    """Remove `key`; where it is a misspelt one, its value goes to the right key."""
    value = mapping.pop(key, None)
    known = model.model_fields if model else {}
    close = difflib.get_close_matches(key, known, n=1)
    if key not in known and close and close[0] not in mapping:
        mapping[close[0]] = value
