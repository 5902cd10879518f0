"""plait: run a DAG of LLM subtasks in parallel, write every step down, resume after a crash.

The public names are imported when first used, so that `plait --help` does not wait for what it does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.clock import Clock
    from runner.dag import DAG
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
    from runner.limits import Limits
    from runner.looking import RunInfo, StoredEvent, TaskInfo
    from runner.orchestrator import Orchestrator, OrchestratorResult
    from runner.parallel import ParallelRunner
    from runner.plan import Plan, PlanError, load_plan
    from runner.policies.follow_ups import FollowUp, FollowUps
    from runner.policies.orchestrator import Phase
    from runner.policies.session import (
        ImpossibleState,
        Interaction,
        Session,
        SessionComplete,
        SessionEnded,
        UnknownStep,
    )
    from runner.policies.workflow import Step, Workflow
    from runner.policy import Decision, Policy, RunView
    from runner.preview import Preview
    from runner.questions import OpenQuestion
    from runner.result import Degradation, Receipt, RunResult, TaskResult
    from runner.run import Run
    from runner.service import RunService
    from runner.sessions import load_session
    from runner.status import RunStatus, TaskStatus
    from runner.task import FailureMode, Retry, Task
    from runner.verdict import Action, Verdict

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
    "dag": "DAG",
    "errors": "AnswerConflict BackendMissing DAGError KeyConflict OwnershipLost PlaitError PolicyMissing Problem "
    "PromptError RunExists RunNotFound RunNotResumable RunOwned StoreRequired TaskNotFound "
    "TurnNotStored",
    "limits": "Limits",
    "looking": "RunInfo StoredEvent TaskInfo",
    "orchestrator": "Orchestrator OrchestratorResult",
    "parallel": "ParallelRunner",
    "plan": "Plan PlanError load_plan",
    "policies.follow_ups": "FollowUp FollowUps",
    "policies.orchestrator": "Phase",
    "policies.session": "ImpossibleState Interaction Session SessionComplete SessionEnded UnknownStep",
    "policies.workflow": "Step Workflow",
    "policy": "Decision Policy RunView",
    "questions": "OpenQuestion",
    "preview": "Preview",
    "result": "Degradation Receipt RunResult TaskResult",
    "run": "Run",
    "service": "RunService",
    "sessions": "load_session",
    "status": "RunStatus TaskStatus",
    "task": "FailureMode Retry Task",
    "verdict": "Action Verdict",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"runner.{_HOME_OF[name]}"), name)
