from __future__ import annotations

import jsonschema_rs
import pytest

from plait.runner.plan import plan_schema


@pytest.fixture(scope="package")
def schema() -> jsonschema_rs.Validator:
    """Of plan files; it takes longer to make than most plans to read."""
    return jsonschema_rs.validator_for(plan_schema())
