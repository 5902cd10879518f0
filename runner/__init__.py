"""plait: run a DAG of LLM subtasks in parallel, store every step, resume after a crash.

Public names are imported at first use, which keeps the start of `plait --help` fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from plait.statuses import RunStatus, TaskStatus

if TYPE_CHECKING:
    from plait import events
    from plait.errors import (
        AnswerConflict,
        BackendMissing,
        DAGError,
        ImpossibleState,
        KeyConflict,
        OwnershipLost,
        PlaitError,
        PolicyMissing,
        Problem,
        PromptError,
        RunExists,
        RunNotFound,
        RunNotResumable,
        RunOwned,
        SessionEnded,
        StoreRequired,
        TaskNotFound,
        TurnNotStored,
        UnknownStep,
    )
    from plait.runner.clock import Clock
    from plait.runner.domain.dag import DAG
    from plait.runner.domain.policy import Decision, Policy, RunView
    from plait.runner.domain.question import OpenQuestion
    from plait.runner.domain.result import Degradation, ResumeSummary, RunResult, TaskResult
    from plait.runner.domain.task import FailureMode, GrowthLimits, Retry, Task
    from plait.runner.domain.waiting import WaitKind, WaitReason
    from plait.runner.log import configure_logging
    from plait.runner.operations.fork_run import Fork, ForkEdits
    from plait.runner.operations.inspect import RunInfo, StoredEvent, TaskInfo
    from plait.runner.operations.preview_reuse import ReuseAction, ReusePreview, ReuseStep
    from plait.runner.operations.workflow_session import load_session
    from plait.runner.orchestrator import LoopState, Orchestrator, OrchestratorResult, load_loop_state
    from plait.runner.parallel import ParallelRunner
    from plait.runner.plan import Plan, PlanError, load_plan
    from plait.runner.policies.follow_ups import FollowUp, FollowUps
    from plait.runner.policies.orchestrator.policy import LoopLimits, OrchestratorPolicy, Phase
    from plait.runner.policies.orchestrator.prompts import Team
    from plait.runner.policies.workflow import Step, Workflow
    from plait.runner.policies.workflow_session import (
        Interaction,
        Session,
        SessionComplete,
    )
    from plait.runner.recovery.preview import Preview
    from plait.runner.recovery.resume_plan import ResumeAction, ResumeStep
    from plait.runner.run import Run
    from plait.runner.scheduling.rates import RateLimits
    from plait.runner.service import RunService

__all__ = [
    "DAG",
    "AnswerConflict",
    "BackendMissing",
    "Clock",
    "DAGError",
    "Decision",
    "Degradation",
    "FailureMode",
    "FollowUp",
    "FollowUps",
    "Fork",
    "ForkEdits",
    "GrowthLimits",
    "ImpossibleState",
    "Interaction",
    "KeyConflict",
    "LoopLimits",
    "LoopState",
    "OpenQuestion",
    "Orchestrator",
    "OrchestratorPolicy",
    "OrchestratorResult",
    "OwnershipLost",
    "ParallelRunner",
    "Phase",
    "PlaitError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyMissing",
    "Preview",
    "Problem",
    "PromptError",
    "RateLimits",
    "ResumeAction",
    "ResumeStep",
    "ResumeSummary",
    "Retry",
    "ReuseAction",
    "ReusePreview",
    "ReuseStep",
    "Run",
    "RunExists",
    "RunInfo",
    "RunNotFound",
    "RunNotResumable",
    "RunOwned",
    "RunResult",
    "RunService",
    "RunStatus",
    "RunView",
    "Session",
    "SessionComplete",
    "SessionEnded",
    "Step",
    "StoreRequired",
    "StoredEvent",
    "Task",
    "TaskInfo",
    "TaskNotFound",
    "TaskResult",
    "TaskStatus",
    "Team",
    "TurnNotStored",
    "UnknownStep",
    "WaitKind",
    "WaitReason",
    "Workflow",
    "configure_logging",
    "events",
    "load_loop_state",
    "load_plan",
    "load_session",
]

_HOMES = {
    "runner.clock": "Clock",
    "runner.domain.dag": "DAG",
    "runner.domain.policy": "Decision Policy RunView",
    "runner.domain.question": "OpenQuestion",
    "runner.domain.result": "Degradation ResumeSummary RunResult TaskResult",
    "runner.domain.task": "FailureMode GrowthLimits Retry Task",
    "runner.domain.waiting": "WaitKind WaitReason",
    "errors": "AnswerConflict BackendMissing DAGError ImpossibleState KeyConflict OwnershipLost PlaitError PlanError "
    "PolicyMissing Problem PromptError RunExists RunNotFound RunNotResumable RunOwned SessionEnded StoreRequired "
    "TaskNotFound TurnNotStored UnknownStep",
    "runner.log": "configure_logging",
    "runner.operations.fork_run": "Fork ForkEdits",
    "runner.operations.inspect": "RunInfo StoredEvent TaskInfo",
    "runner.operations.preview_reuse": "ReuseAction ReusePreview ReuseStep",
    "runner.operations.workflow_session": "load_session",
    "runner.orchestrator": "LoopState Orchestrator OrchestratorResult load_loop_state",
    "runner.parallel": "ParallelRunner",
    "runner.plan": "Plan load_plan",
    "runner.policies.follow_ups": "FollowUp FollowUps",
    "runner.policies.orchestrator.policy": "LoopLimits OrchestratorPolicy Phase",
    "runner.policies.orchestrator.prompts": "Team",
    "runner.policies.workflow": "Step Workflow",
    "runner.policies.workflow_session": "Interaction Session SessionComplete",
    "runner.recovery.preview": "Preview",
    "runner.recovery.resume_plan": "ResumeAction ResumeStep",
    "runner.run": "Run",
    "runner.scheduling.rates": "RateLimits",
    "runner.service": "RunService",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "events":
        return importlib.import_module("plait.events")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'plait.runner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"plait.{_HOME_OF[name]}"), name)
