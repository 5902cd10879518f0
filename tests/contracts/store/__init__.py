"""The contract of a store, as tests to run over one of yours (docs/guides/stores.md)."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.contracts.store.writes",
    "tests.contracts.store.reads",
    "tests.contracts.store.interrupts",
    "tests.contracts.store.questions",
    "tests.contracts.store.growth",
    "tests.contracts.store.notes",
    "tests.contracts.store.durability",
)

from tests.contracts.store.writes import StoreContract  # noqa: E402 - pytest rewrites the asserts of the modules registered above

__all__ = ["StoreContract"]
