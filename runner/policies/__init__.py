"""Built-in policies, recreated from the stored kind and settings of a run. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from plait.errors import PlaitError, PolicyMissing, nearest
from plait.json_form import JsonValue
from plait.runner.domain.policy import Policy

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
