"""Run a DAG of LLM subtasks in parallel, store every step, resume after a crash.

`from plait import DAG, ParallelRunner, SQLiteStore, Task` is all that a program needs. Names that only the author of a
backend or of a store needs are in `plait.backends` and `plait.persistence`.

A public name is imported when first used: `plait --help` loads neither SQLite nor an SDK.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from plait import runner

if TYPE_CHECKING:
    from plait.backends import (
        NO_USAGE,
        AcpBackend,
        Allowance,
        Answer,
        AnthropicBackend,
        Backend,
        BackendError,
        BackendUnavailable,
        ClaudeCodeBackend,
        CodexBackend,
        Conversation,
        ConversationRequest,
        DaskHosts,
        ErrorKind,
        FunctionBackend,
        JsonInput,
        JsonValue,
        LangGraphBackend,
        LocalBackend,
        Message,
        OpenAIBackend,
        Output,
        PersonBackend,
        Price,
        PydanticAIBackend,
        Question,
        Reply,
        Role,
        SSHHost,
        SSHHosts,
        Usage,
        as_backend,
        ask,
        cancel_requested,
    )
    from plait.persistence import (
        MemoryStore,
        PostgresStore,
        SQLiteStore,
        Store,
        StoreBusy,
        StoreError,
        StoreNotOpen,
        StoreUnusable,
    )
    from plait.runner import *  # noqa: F403 - each public name of the runner, listed there

__all__ = [
    "NO_USAGE",
    "AcpBackend",
    "Allowance",
    "Answer",
    "AnthropicBackend",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "ClaudeCodeBackend",
    "CodexBackend",
    "Conversation",
    "ConversationRequest",
    "DaskHosts",
    "ErrorKind",
    "FunctionBackend",
    "JsonInput",
    "JsonValue",
    "LangGraphBackend",
    "LocalBackend",
    "MemoryStore",
    "Message",
    "OpenAIBackend",
    "Output",
    "PersonBackend",
    "PostgresStore",
    "Price",
    "PydanticAIBackend",
    "Question",
    "Reply",
    "Role",
    "SQLiteStore",
    "SSHHost",
    "SSHHosts",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreNotOpen",
    "StoreUnusable",
    "Usage",
    "as_backend",
    "ask",
    "cancel_requested",
]
__all__ += runner.__all__


def __getattr__(name: str) -> object:
    if name in __all__:
        for package in ("runner", "backends", "persistence"):
            module = import_module(f"plait.{package}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
