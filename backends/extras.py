"""Check for the packages of optional extras."""

from __future__ import annotations

from importlib.util import find_spec

from plait.backends.errors import BackendUnavailable


def require(module: str, extra: str) -> None:
    """Raise BackendUnavailable, naming the extra, if `module` is not installed. Imports nothing."""
    if find_spec(module) is None:
        raise BackendUnavailable(f"the {module} package is not installed; run: pip install 'plait[{extra}]'")
