"""Built-in policies, recreated from the stored kind and settings of a run. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plait.errors import PlaitError, PolicyMissing
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest
from plait.runner.domain.policy import Policy
from plait.task import Retry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Part = TypeVar("Part", bound=DataclassInstance)


_HOMES = {
    "follow_ups": ("follow_ups", "FollowUps"),
    "orchestrator": ("goal_policy", "OrchestratorPolicy"),
    "workflow": ("step_workflow", "Workflow"),
}


def policy_of(kind: str, settings: Mapping[str, JsonValue]) -> Policy:
    """Return the policy of the given `kind`, made from stored `settings`.

    Raises PolicyMissing if the kind is not built in, PlaitError if the settings are invalid.
    """
    if kind not in _HOMES:
        hint = nearest(kind, _HOMES) or (
            "; pass the policy of the run as policy=... to `resume` of the runner, or to `start` of its runs"
        )
        raise PolicyMissing(f"there is no built-in policy {kind!r}{hint}")
    module, name = _HOMES[kind]
    made = getattr(importlib.import_module(f"plait.runner.policies.{module}"), name)
    try:
        return cast("Policy", made.from_settings(settings))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlaitError(f"the stored settings of the {kind} policy cannot be read: {error!r}") from error


def settings_of(part: DataclassInstance) -> dict[str, JsonValue]:
    """Return the fields of `part` that differ from their defaults."""
    given = {field.name: (getattr(part, field.name), field.default) for field in fields(part)}
    return {name: _plain(value) for name, (value, default) in given.items() if value != default}


def made_of(kind: type[Part], settings: Mapping[str, Any]) -> Part:
    """Return the `kind` described by `settings` from `settings_of`. Raises TypeError or ValueError for invalid
    fields.
    """
    given = dict(settings)
    if "retry" in given:
        retry: dict[str, Any] = given["retry"]
        given["retry"] = Retry(**{**retry, "on": cast("Any", frozenset(retry["on"]))})
    return kind(**given)


def _plain(value: Any) -> JsonValue:
    if isinstance(value, Retry):
        return cast("JsonValue", {**asdict(value), "on": sorted(value.on)})
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, JsonValue]", value))
    return cast("JsonValue", value.value if isinstance(value, Enum) else value)
