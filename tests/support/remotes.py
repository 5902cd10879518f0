"""Both adapters on a vendor's SDK, for tests of what they do alike."""

from __future__ import annotations

from typing import TypeAlias

import pytest

from plait.backends import AnthropicBackend, OpenAIBackend
from tests.support.wire import ChatCompletions, Dialect, Messages

Remote: TypeAlias = OpenAIBackend | AnthropicBackend


@pytest.fixture(params=["openai", "anthropic"])
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return ChatCompletions() if request.param == "openai" else Messages()


def make(dialect: Dialect, url: str, request_timeout: float = 10.0, **options: object) -> Remote:
    kind = OpenAIBackend if dialect.name == "openai" else AnthropicBackend
    return kind("m", base_url=url + dialect.prefix, request_timeout=request_timeout, **options)  # type: ignore[arg-type]
