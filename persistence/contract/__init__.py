"""The contract of a store, as tests to run over one of yours. The suite needs pytest, of the extra `test`."""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError("plait.persistence.contract needs pytest, which plait's extra `test` installs") from error

pytest.register_assert_rewrite(
    "plait.persistence.contract.writes",
    "plait.persistence.contract.reads",
    "plait.persistence.contract.interrupts",
    "plait.persistence.contract.questions",
    "plait.persistence.contract.growth",
    "plait.persistence.contract.notes",
    "plait.persistence.contract.durability",
)

from plait.persistence.contract.writes import StoreContract  # noqa: E402 - pytest rewrites the asserts of the modules registered above

__all__ = ["StoreContract"]
