"""Backends of plan files on hosts: the properties that the runner reads, although the hosts make the backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from plait.backends import Billing
from plait.backends.backend_specs import BackendSpec, placed
from plait.backends.prices import FREE, UNBILLED
from plait.hosts import SSHHosts

SPECS: TypeAdapter[Any] = TypeAdapter(BackendSpec)
URL = "https://api.example/v1"


@pytest.mark.parametrize(
    ("spec", "billing"),
    [
        ({"kind": "openai", "model": "m", "base_url": URL}, Billing(URL, "m")),
        ({"kind": "openai", "model": "m", "base_url": [URL, "http://gpu2/v1"]}, Billing(URL, "m")),
        ({"kind": "anthropic", "model": "m", "base_url": URL}, Billing(URL, "m", max_output_tokens=16_384)),
        ({"kind": "local", "gguf": "no such file"}, Billing(price=FREE)),
        ({"kind": "claude-code", "model": "m"}, Billing("anthropic", "m", sums_requests=True)),
        ({"kind": "codex", "model": "m"}, Billing("openai", "m", sums_requests=True)),
        ({"kind": "acp", "agent": "gemini", "model": "m"}, Billing("google", "m", sums_requests=True)),
        ({"kind": "pydantic-ai", "model": "mistral:m", "tools": ["nowhere:f"]}, Billing(model="m", estimates=True)),
        ({"kind": "acp", "command": ["goose", "acp"]}, Billing(sums_requests=True)),
        ({"kind": "function", "call": "nowhere:f"}, UNBILLED),
    ],
)
def test_the_price_of_a_backend_is_the_same_on_hosts(spec: dict[str, Any], billing: Billing, tmp_path: Path) -> None:
    assert placed(SPECS.validate_python({**spec, "on": "fleet"}), tmp_path, SSHHosts(["m1"])).billing == billing
