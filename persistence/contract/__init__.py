"""The contract of a store, as tests to run over one of yours. It needs pytest: `pip install 'plait[test]'`."""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError("persistence.contract needs pytest: pip install 'plait[test]'") from error

pytest.register_assert_rewrite(
    "persistence.contract.writes",
    "persistence.contract.reads",
    "persistence.contract.interrupts",
    "persistence.contract.questions",
    "persistence.contract.growth",
    "persistence.contract.notes",
    "persistence.contract.durability",
)

from persistence.contract.writes import StoreContract  # noqa: E402 - its asserts are rewritten from here on

__all__ = ["StoreContract"]
