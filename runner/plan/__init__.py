"""Plan files: what is to be run, written down in YAML, JSON or TOML."""

from __future__ import annotations

from runner.plan.build import Plan, load_plan, parse_plan
from runner.plan.errors import PlanError, PlanProblem
from runner.plan.model import plan_schema

__all__ = ["Plan", "PlanError", "PlanProblem", "load_plan", "parse_plan", "plan_schema"]
