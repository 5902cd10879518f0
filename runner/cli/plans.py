"""Reading the plan file that a person names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plait.runner import Plan, load_plan
from plait.runner.cli.exits import Fault
from plait.runner.cli.options import is_text
from plait.runner.plan.loader import load_plan_with_functions


def read_plan(path: Path, inputs: Mapping[str, str], *, with_functions: bool = False) -> Plan:
    """The plan in the file at `path`. `with_functions`: those that it calls have to be there as well. Raises
    PlanError with every mistake.
    """
    if not is_text(str(path)):
        raise Fault(f"the name of the plan file {str(path)!r} is not text in UTF-8, so it cannot be stored; rename it")
    return load_plan_with_functions(path, inputs) if with_functions else load_plan(path, overrides=inputs)
