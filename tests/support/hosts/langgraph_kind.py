"""A graph for hosts to make by the name of a function."""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from plait.backends import LangGraphBackend
from tests.support.graphs import Work, chain
from tests.support.hosts.functions import host


def graph() -> LangGraphBackend:
    """A graph that keeps the host on which each of its runs was done."""
    return LangGraphBackend(chain(_work).compile(checkpointer=InMemorySaver()))


def _work(state: Work) -> dict[str, Any]:
    return {"done": [f"{state.get('prompt')} on {host()}"]}
