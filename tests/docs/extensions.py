"""The extensions of the site, which docs/conf.py finds in a folder that is no package."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent.parent / "docs" / "_ext"


def load_extension(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import one extension afresh."""
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop(name, None)
    return import_module(name)
