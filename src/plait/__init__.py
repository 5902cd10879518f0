"""Run a DAG of LLM subtasks in parallel, store every step, resume after a crash.

`from plait import DAG, ParallelRunner, SQLiteStore, Task` is all that most programs need. Further names have homes:
`plait.errors`, `plait.results`, `plait.workflows`, `plait.orchestration`, `plait.hosts`, and for the author of a
backend or of a store `plait.backends` and `plait.persistence`.

A public name is imported when first used: `plait --help` loads neither SQLite nor an SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait import events
    from plait.backends import (
        AcpBackend,
        AnthropicBackend,
        Backend,
        ClaudeCodeBackend,
        CodexBackend,
        CommandBackend,
        Conversation,
        ConversationRequest,
        FunctionBackend,
        LangGraphBackend,
        LocalBackend,
        Message,
        OpenAIBackend,
        PersonBackend,
        Price,
        PydanticAIBackend,
        Question,
        Reply,
        Usage,
        ask,
        cancel_requested,
    )
    from plait.errors import BackendError, ErrorKind, PlaitError
    from plait.persistence import MemoryStore, PostgresStore, SQLiteStore, Store
    from plait.program_log import configure_logging
    from plait.runner.client.runs import Runs
    from plait.runner.domain.asked_question import OpenQuestion
    from plait.runner.domain.dag import DAG
    from plait.runner.domain.run_result import RunResult, TaskResult
    from plait.runner.engine.live_run import Run
    from plait.runner.orchestrator import Orchestrator
    from plait.runner.parallel_runner import ParallelRunner
    from plait.runner.plan_run import Plan
    from plait.runner.policies.step_workflow import Step, Workflow
    from plait.runner.scheduling.own_limits import RateLimits
    from plait.statuses import RunStatus, TaskStatus
    from plait.task import Best, Check, FailureMode, GrowthLimits, Retry, Task

__all__ = [
    "DAG",
    "AcpBackend",
    "AnthropicBackend",
    "Backend",
    "BackendError",
    "Best",
    "Check",
    "ClaudeCodeBackend",
    "CodexBackend",
    "CommandBackend",
    "Conversation",
    "ConversationRequest",
    "ErrorKind",
    "FailureMode",
    "FunctionBackend",
    "GrowthLimits",
    "LangGraphBackend",
    "LocalBackend",
    "MemoryStore",
    "Message",
    "OpenAIBackend",
    "OpenQuestion",
    "Orchestrator",
    "ParallelRunner",
    "PersonBackend",
    "PlaitError",
    "Plan",
    "PostgresStore",
    "Price",
    "PydanticAIBackend",
    "Question",
    "RateLimits",
    "Reply",
    "Retry",
    "Run",
    "RunResult",
    "RunStatus",
    "Runs",
    "SQLiteStore",
    "Step",
    "Store",
    "Task",
    "TaskResult",
    "TaskStatus",
    "Usage",
    "Workflow",
    "ask",
    "cancel_requested",
    "configure_logging",
    "events",
]

_HOMES = {
    "backends": "AcpBackend AnthropicBackend Backend ClaudeCodeBackend CodexBackend CommandBackend Conversation "
    "ConversationRequest FunctionBackend LangGraphBackend LocalBackend Message OpenAIBackend "
    "PersonBackend Price PydanticAIBackend Question Reply Usage ask cancel_requested",
    "errors": "BackendError ErrorKind PlaitError",
    "persistence": "MemoryStore PostgresStore SQLiteStore Store",
    "runner.domain.dag": "DAG",
    "runner.domain.asked_question": "OpenQuestion",
    "runner.domain.run_result": "RunResult TaskResult",
    "program_log": "configure_logging",
    "runner.orchestrator": "Orchestrator",
    "runner.parallel_runner": "ParallelRunner",
    "runner.plan_run": "Plan",
    "runner.policies.step_workflow": "Step Workflow",
    "runner.engine.live_run": "Run",
    "runner.scheduling.own_limits": "RateLimits",
    "runner.client.runs": "Runs",
    "statuses": "RunStatus TaskStatus",
    "task": "Best Check FailureMode GrowthLimits Retry Task",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "events":
        return import_module("plait.events")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(f"plait.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
