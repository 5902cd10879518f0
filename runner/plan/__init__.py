"""Plan files: descriptions of runs in YAML, JSON or TOML."""

from __future__ import annotations

from plait.errors import PlanError, PlanProblem
from plait.runner.plan.plan_file import Plan, parse_plan
from plait.runner.plan.plan_models import plan_schema

__all__ = ["Plan", "PlanError", "PlanProblem", "parse_plan", "plan_schema"]
