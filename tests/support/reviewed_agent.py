"""An agent of LangChain with one tool, whose calls a person reviews. Its model is a script."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from plait.backends import LangGraphBackend


class Model(GenericFakeChatModel):
    """Calls the tool for Ada and for Bob, and then says how the calls ended."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *rest: Any, **options: Any) -> Any:
        ended = sorted(f"{one.name} {one.status}: {one.content}" for one in messages if one.type == "tool")
        calls = [{"name": "send", "args": {"to": to}, "id": to} for to in ("ada", "bob")]
        self.messages = iter([AIMessage("; ".join(ended)) if ended else AIMessage("", tool_calls=calls)])
        return super()._generate(messages, *rest, **options)


def send(to: str) -> str:
    """Send the report."""
    return f"sent to {to}"


def reviewed(**options: Any) -> LangGraphBackend:
    """The agent; `options` are those of the middleware."""
    review: Any = HumanInTheLoopMiddleware({"send": True}, **options)
    return LangGraphBackend(
        create_agent(Model(messages=iter(())), [send], middleware=[review], checkpointer=InMemorySaver())
    )
