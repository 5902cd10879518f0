"""Each kind of error has a next step for a person."""

from __future__ import annotations

from plait.errors import ErrorKind
from plait.runner.views.event_sentences import REMEDIES, remedy


def test_every_kind_of_error_has_a_remedy() -> None:
    assert set(ErrorKind) <= set(REMEDIES)
    assert remedy("auth") == "Check the key, the login and the credit, then retry the failed tasks."
    assert (remedy(None), remedy("odd")) == (None, None)
