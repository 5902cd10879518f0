"""Backends: what answers the prompts.

Importing this package loads no SDK: `OpenAIBackend`, `AnthropicBackend`, `LangGraphBackend` and `LocalBackend` load
theirs when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .asking import ask
from .errors import BackendError, BackendUnavailable, ErrorKind
from .function import FunctionBackend, as_backend
from .protocol import (
    NO_USAGE,
    Answer,
    Backend,
    Conversation,
    Files,
    ForkingBackend,
    JsonInput,
    JsonValue,
    LeftTurn,
    Message,
    Opening,
    OutlivingBackend,
    Output,
    Question,
    Reply,
    Role,
    Usage,
)

if TYPE_CHECKING:
    from .agents.acp import AcpBackend
    from .agents.claude import ClaudeCodeBackend
    from .agents.codex import CodexBackend
    from .agents.gemini import GeminiBackend
    from .anthropic import AnthropicBackend
    from .langgraph import LangGraphBackend
    from .local import LocalBackend
    from .openai import OpenAIBackend
    from .person import PersonBackend

__all__ = [
    "NO_USAGE",
    "AcpBackend",
    "Answer",
    "AnthropicBackend",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "ClaudeCodeBackend",
    "CodexBackend",
    "Conversation",
    "ErrorKind",
    "Files",
    "ForkingBackend",
    "FunctionBackend",
    "GeminiBackend",
    "JsonInput",
    "JsonValue",
    "LangGraphBackend",
    "LeftTurn",
    "LocalBackend",
    "Message",
    "OpenAIBackend",
    "Opening",
    "OutlivingBackend",
    "Output",
    "PersonBackend",
    "Question",
    "Reply",
    "Role",
    "Usage",
    "as_backend",
    "ask",
]

_LAZY = {
    "AcpBackend": "agents.acp",
    "AnthropicBackend": "anthropic",
    "ClaudeCodeBackend": "agents.claude",
    "CodexBackend": "agents.codex",
    "GeminiBackend": "agents.gemini",
    "LangGraphBackend": "langgraph",
    "LocalBackend": "local",
    "OpenAIBackend": "openai",
    "PersonBackend": "person",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
