"""Runs that reach a goal: a model plans the tasks, and judges the results."""

from __future__ import annotations

from plait.runner.orchestrator import Orchestrator, OrchestratorResult
from plait.runner.policies.goal_policy import LoopLimits, OrchestratorPolicy, Phase, Team

__all__ = [
    "LoopLimits",
    "Orchestrator",
    "OrchestratorPolicy",
    "OrchestratorResult",
    "Phase",
    "Team",
]
