"""Agents of pydantic-ai whose model is a server on 127.0.0.1."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def wired_agent(url: str, **options: Any) -> Agent[Any, Any]:
    """An agent that sends its requests to the chat completions of the server at `url`."""
    return Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="a-key")), **options)
