"""What an attempt counts in the budget of its run."""

from __future__ import annotations

import pytest

from plait.errors import ErrorKind
from plait.runner.state.budget import counted_cost
from plait.usage import NO_USAGE, Usage


@pytest.mark.parametrize(
    ("usage", "error_kind", "is_cut", "counted"),
    [
        (Usage(1, 1, 0.5), None, False, (0.5, True)),
        (Usage(1, 1, 0.5), None, True, (4.0, False)),
        (Usage(1, 1, 9.0), None, True, (9.0, False)),
        (Usage(1, 1, 0.5, cost_is_partial=True), None, False, (4.0, False)),
        (NO_USAGE, ErrorKind.OVERLOADED, False, (0.0, True)),
        (NO_USAGE, ErrorKind.OVERLOADED, True, (4.0, False)),
        (NO_USAGE, ErrorKind.CRASHED, False, (4.0, False)),
    ],
)
def test_a_cost_that_is_not_known_counts_at_what_was_reserved(
    usage: Usage, error_kind: str | None, is_cut: bool, counted: tuple[float, bool]
) -> None:
    assert counted_cost(usage, 4.0, error_kind=error_kind, is_cut=is_cut) == counted
