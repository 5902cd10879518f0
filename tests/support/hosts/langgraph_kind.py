"""Backends of libraries, for hosts to make by the name of a function."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, FunctionModel

from plait.backends import LangGraphBackend, PydanticAIBackend
from tests.support.graphs import Work, chain


def graph() -> LangGraphBackend:
    """A graph that keeps the host on which each of its runs was done."""
    return LangGraphBackend(chain(_work).compile(checkpointer=InMemorySaver()))


def _work(state: Work) -> dict[str, Any]:
    return {"done": [f"{state.get('prompt')} on {_host()}"]}


def agent() -> PydanticAIBackend:
    """An agent whose model answers with the host and the number of messages so far."""
    return PydanticAIBackend(Agent(FunctionModel(stream_function=_answer)))


async def _answer(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
    yield f"{len(messages)} on {_host()}"


def _host() -> str:
    return Path(os.environ["XDG_STATE_HOME"]).name
