"""Agents of pydantic-ai whose model is a server on 127.0.0.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_ai import Agent


def wired_agent(url: str, **options: Any) -> Agent[Any, Any]:
    """An agent that sends its requests to the chat completions of the server at `url`."""
    # Loaded here: two seconds, which every worker of pytest would pay when it looks for tests.
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="a-key")), **options)
