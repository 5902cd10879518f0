"""Each kind of error has a next step for a person."""

from __future__ import annotations

import json

from plait.errors import ErrorKind
from plait.events import EVENTS, BackendThrottled, HostAway, RunEnded, TaskFailed, TaskStarted, columns_of
from plait.runner.views.event_sentences import REMEDIES, SENTENCES, event_sentence, remedy, sentence
from plait.runner.views.view_models import usage_fields
from plait.usage import Usage


def test_every_kind_of_error_has_a_remedy() -> None:
    assert set(ErrorKind) <= set(REMEDIES)
    assert remedy("auth") == "Check the key, the login and the credit, then retry the failed tasks."
    assert (remedy(None), remedy("odd")) == (None, None)


def test_each_kind_of_event_that_is_told_has_a_sentence() -> None:
    assert SENTENCES.keys() == {kind for kind, one in EVENTS.items() if one.shown and one is not RunEnded}


def test_a_live_event_and_a_stored_one_say_the_same() -> None:
    usage = Usage(310, 42, 0.0123)
    failed = TaskFailed("2026-01-01T00:00:00.000Z", "a", 2, "timeout", "too\nlong", 1.2, usage)
    stored = {"error_kind": "timeout", "error": "too\nlong", "duration_s": 1.2, **usage_fields(usage)}
    line = "failed 1.2s 310+42 tokens $0.0123 timeout: too long"
    assert event_sentence(failed) == sentence("task_failed", stored) == line
    away = HostAway(failed.at, "m3", failed.at, "timed out", ("a", "b"))
    assert event_sentence(away) == sentence("host_away", {"at": away.at, **json.loads(columns_of(away)[4])})
    assert event_sentence(away).endswith(" (timed out); a, b wait")


def test_a_start_says_in_whose_place_a_spare_is_called() -> None:
    moved = TaskStarted("2026-01-01T00:00:00.000Z", "a", 2, "second", moved_from="api")
    assert event_sentence(moved) == "started (second, in place of api, attempt 2)"
    assert json.loads(columns_of(moved)[4]) == {"backend": "second", "moved_from": "api"}


def test_a_backend_without_credit_waits_for_a_person() -> None:
    empty = BackendThrottled("2026-01-01T00:00:00.000Z", "api", None, "no_credit", 0, 8)
    assert event_sentence(empty) == "api has no credit left, and is not called until a person has answered"
