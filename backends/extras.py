"""TODO."""

from __future__ import annotations

from importlib.util import find_spec

from plait.backends.errors import BackendUnavailable


def require(module: str, extra: str) -> None:
    """BackendUnavailable, naming the extra, when `module` is not installed. Nothing is imported."""
    if find_spec(module) is None:
        raise BackendUnavailable(f"the {module} package is not installed; run: pip install 'plait[{extra}]'")
