"""Backends: adapters that answer prompts.

Importing the package loads no SDK: `OpenAIBackend`, `AnthropicBackend`, `LangGraphBackend`, `PydanticAIBackend` and
`LocalBackend` load their SDK on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.backends.backend_protocol import (
    Abilities,
    Allowance,
    Attachment,
    Backend,
    Conversation,
    ConversationRequest,
    DetachedBackend,
    DetachedTurn,
    Files,
    Output,
    Reply,
)
from plait.backends.function_backend import FunctionBackend, PersonBackend, as_backend
from plait.backends.prices import Billing, Price
from plait.backends.running_turn import ask, cancel_requested
from plait.dialogue import Answer, Message, Question, Role
from plait.json_form import JsonInput, JsonValue
from plait.task import ModelOptions
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from plait.backends.agents.acp_agent import AcpBackend
    from plait.backends.agents.claude_code import ClaudeCodeBackend
    from plait.backends.agents.codex import CodexBackend
    from plait.backends.command_backend import CommandBackend
    from plait.backends.frameworks.langgraph_graph import LangGraphBackend
    from plait.backends.frameworks.pydantic_ai_agent import PydanticAIBackend
    from plait.backends.models.anthropic_api import AnthropicBackend
    from plait.backends.models.load_balancing import LoadBalancedBackend
    from plait.backends.models.local_model import LocalBackend
    from plait.backends.models.openai_api import OpenAIBackend

__all__ = [
    "NO_USAGE",
    "Abilities",
    "AcpBackend",
    "Allowance",
    "Answer",
    "AnthropicBackend",
    "Attachment",
    "Backend",
    "Billing",
    "ClaudeCodeBackend",
    "CodexBackend",
    "CommandBackend",
    "Conversation",
    "ConversationRequest",
    "DetachedBackend",
    "DetachedTurn",
    "Files",
    "FunctionBackend",
    "JsonInput",
    "JsonValue",
    "LangGraphBackend",
    "LoadBalancedBackend",
    "LocalBackend",
    "Message",
    "ModelOptions",
    "OpenAIBackend",
    "Output",
    "PersonBackend",
    "Price",
    "PydanticAIBackend",
    "Question",
    "Reply",
    "Role",
    "Usage",
    "as_backend",
    "ask",
    "cancel_requested",
]

_LAZY = {
    "AcpBackend": "agents.acp_agent",
    "AnthropicBackend": "models.anthropic_api",
    "ClaudeCodeBackend": "agents.claude_code",
    "CodexBackend": "agents.codex",
    "CommandBackend": "command_backend",
    "LangGraphBackend": "frameworks.langgraph_graph",
    "LoadBalancedBackend": "models.load_balancing",
    "LocalBackend": "models.local_model",
    "OpenAIBackend": "models.openai_api",
    "PydanticAIBackend": "frameworks.pydantic_ai_agent",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'plait.backends' has no attribute {name!r}")
    return getattr(import_module(f"plait.backends.{_LAZY[name]}"), name)
