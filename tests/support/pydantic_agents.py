"""Agents of pydantic-ai whose model is a server on 127.0.0.1."""

from __future__ import annotations

import ssl
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from pydantic_ai import Agent


@cache
def _tls() -> ssl.SSLContext:
    """One for all agents, none of which needs it: reading all certificates takes longer than a turn."""
    return ssl.create_default_context()


def wired_agent(url: str, **options: Any) -> Agent[Any, Any]:
    """An agent that sends its requests to the chat completions of the server at `url`."""
    # Loaded here: two seconds, which every worker of pytest would pay when it looks for tests.
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    with mock.patch("ssl.create_default_context", return_value=_tls()):
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="a-key")
    return Agent(OpenAIChatModel("m", provider=provider), **options)
