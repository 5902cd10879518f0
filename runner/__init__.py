"""plait: run a DAG of LLM subtasks in parallel, write every step down, resume after a crash.

The public names are imported when first used, so that `plait --help` does not wait for what it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.clock import Clock
    from runner.domain.dag import DAG
    from runner.domain.limits import Limits
    from runner.domain.policy import Decision, Policy, RunView
    from runner.domain.question import OpenQuestion
    from runner.domain.result import Degradation, Receipt, RunResult, TaskResult
    from runner.domain.status import RunStatus, TaskStatus
    from runner.domain.task import FailureMode, Retry, Task
    from runner.errors import (
        AnswerConflict,
        BackendMissing,
        DAGError,
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
    )
    from runner.operations.inspect import RunInfo, StoredEvent, TaskInfo
    from runner.operations.workflow_session import load_session
    from runner.orchestrator import Orchestrator, OrchestratorResult
    from runner.parallel import ParallelRunner
    from runner.plan import Plan, PlanError, load_plan
    from runner.policies.follow_ups import FollowUp, FollowUps
    from runner.policies.orchestrator.policy import Phase
    from runner.policies.workflow import Step, Workflow
    from runner.policies.workflow_session import (
        ImpossibleState,
        Interaction,
        Session,
        SessionComplete,
        SessionEnded,
        UnknownStep,
    )
    from runner.recovery.preview import Preview
    from runner.recovery.resume_plan import Action, Verdict
    from runner.run import Run
    from runner.service import RunService

__all__ = [
    "DAG",
    "Action",
    "AnswerConflict",
    "BackendMissing",
    "Clock",
    "DAGError",
    "Decision",
    "Degradation",
    "FailureMode",
    "FollowUp",
    "FollowUps",
    "ImpossibleState",
    "Interaction",
    "KeyConflict",
    "Limits",
    "OpenQuestion",
    "Orchestrator",
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
    "Receipt",
    "Retry",
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
    "TurnNotStored",
    "UnknownStep",
    "Verdict",
    "Workflow",
    "load_plan",
    "load_session",
]

_HOMES = {
    "clock": "Clock",
    "domain.dag": "DAG",
    "domain.limits": "Limits",
    "domain.policy": "Decision Policy RunView",
    "domain.question": "OpenQuestion",
    "domain.result": "Degradation Receipt RunResult TaskResult",
    "domain.status": "RunStatus TaskStatus",
    "domain.task": "FailureMode Retry Task",
    "errors": "AnswerConflict BackendMissing DAGError KeyConflict OwnershipLost PlaitError PolicyMissing Problem "
    "PromptError RunExists RunNotFound RunNotResumable RunOwned StoreRequired TaskNotFound TurnNotStored",
    "operations.inspect": "RunInfo StoredEvent TaskInfo",
    "operations.workflow_session": "load_session",
    "orchestrator": "Orchestrator OrchestratorResult",
    "parallel": "ParallelRunner",
    "plan": "Plan PlanError load_plan",
    "policies.follow_ups": "FollowUp FollowUps",
    "policies.orchestrator.policy": "Phase",
    "policies.workflow": "Step Workflow",
    "policies.workflow_session": "ImpossibleState Interaction Session SessionComplete SessionEnded UnknownStep",
    "recovery.preview": "Preview",
    "recovery.resume_plan": "Action Verdict",
    "run": "Run",
    "service": "RunService",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner.{_HOME_OF[name]}"), name)
