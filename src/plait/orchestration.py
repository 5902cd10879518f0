"""Runs that reach a goal: a model plans the tasks, and judges the results."""

from __future__ import annotations

from plait.runner.orchestrator import LoopState, Orchestrator, OrchestratorResult, load_loop_state
from plait.runner.policies.goal_policy import LoopLimits, OrchestratorPolicy, Phase, Team

__all__ = [
    "LoopLimits",
    "LoopState",
    "Orchestrator",
    "OrchestratorPolicy",
    "OrchestratorResult",
    "Phase",
    "Team",
    "load_loop_state",
]
