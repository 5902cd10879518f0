"""Plan files: descriptions of runs in YAML, JSON or TOML."""

from __future__ import annotations

from plait.errors import PlanError, PlanProblem
from plait.runner.plan.loader import Plan, load_plan, parse_plan
from plait.runner.plan.schema import plan_schema

__all__ = ["Plan", "PlanError", "PlanProblem", "load_plan", "parse_plan", "plan_schema"]
