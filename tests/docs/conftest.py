"""Fixtures that several tests of the documentation use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.extensions import load_extension


@pytest.fixture
def event_reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_extension("event_reference", monkeypatch)
