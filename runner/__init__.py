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
        StoreRequired,
        TaskNotFound,
        TurnNotStored,
        UnknownStep,
        WorkflowEnded,
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
    from plait.runner.operations.workflow_progress import load_progress
    from plait.runner.orchestrator import LoopState, Orchestrator, OrchestratorResult, load_loop_state
    from plait.runner.parallel import ParallelRunner
    from plait.runner.plan import Plan, PlanError, load_plan
    from plait.runner.policies.follow_ups import FollowUp, FollowUps
    from plait.runner.policies.orchestrator.policy import LoopLimits, OrchestratorPolicy, Phase
    from plait.runner.policies.orchestrator.prompts import Team
    from plait.runner.policies.step_workflow import (
        Interaction,
        Step,
        Workflow,
        WorkflowComplete,
        WorkflowProgress,
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
    "WorkflowComplete",
    "WorkflowEnded",
    "WorkflowProgress",
    "configure_logging",
    "events",
    "load_loop_state",
    "load_plan",
    "load_progress",
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
    "PolicyMissing Problem PromptError RunExists RunNotFound RunNotResumable RunOwned WorkflowEnded StoreRequired "
    "TaskNotFound TurnNotStored UnknownStep",
    "runner.log": "configure_logging",
    "runner.operations.fork_run": "Fork ForkEdits",
    "runner.operations.inspect": "RunInfo StoredEvent TaskInfo",
    "runner.operations.preview_reuse": "ReuseAction ReusePreview ReuseStep",
    "runner.operations.workflow_progress": "load_progress",
    "runner.orchestrator": "LoopState Orchestrator OrchestratorResult load_loop_state",
    "runner.parallel": "ParallelRunner",
    "runner.plan": "Plan load_plan",
    "runner.policies.follow_ups": "FollowUp FollowUps",
    "runner.policies.orchestrator.policy": "LoopLimits OrchestratorPolicy Phase",
    "runner.policies.orchestrator.prompts": "Team",
    "runner.policies.step_workflow": "Interaction Step Workflow WorkflowComplete WorkflowProgress",
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
