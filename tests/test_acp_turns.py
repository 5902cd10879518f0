"""Turns with an agent that speaks ACP, shown on a fake one that keeps its own sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.contract import BackendContract, Subject
from tests.support.agents import Home, make_home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return make_home(tmp_path / "home", monkeypatch)


class TestContract(BackendContract):
    @pytest.fixture
    def subject(self, home: Home) -> Subject:
        return Subject(home.acp(), home.acp("--hangs"), home.acp("--fails"))
