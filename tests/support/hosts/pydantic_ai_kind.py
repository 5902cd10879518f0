"""An agent of pydantic-ai for hosts to make by the name of a function."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

from plait.backends import PydanticAIBackend
from tests.support.hosts.functions import host


def agent() -> PydanticAIBackend:
    """An agent whose model answers with the host and the number of messages so far."""
    return PydanticAIBackend(Agent(FunctionModel(stream_function=_answer)))


async def _answer(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
    yield f"{len(messages)} on {host()}"
