"""Reading what a person typed as an answer."""

from __future__ import annotations

import pytest

from plait.backends import Question
from plait.json_form import JsonValue
from plait.runner.domain.asked_question import Asking, Way


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ('{"to": "here"}', {"to": "here"}),
        (" false\n", False),
        ("7", 7),
        ('"7"', "7"),
        ("yes", "yes"),
        ("", ""),
        ("NaN", "NaN"),
        ('{"to": "here"', '{"to": "here"'),
        ("so:\n```json\n3\n```", "so:\n```json\n3\n```"),
        ("<think>no</think> 3", "<think>no</think> 3"),
        ("[1]" * 200_000, "[1]" * 200_000),
    ],
    ids=lambda one: str(one)[:20],
)
def test_an_answer_of_any_value_is_json_as_a_whole_or_else_text(typed: str, value: JsonValue) -> None:
    read = Asking(Question("Well?", {}), Way.REPLY).read(typed)
    assert (type(read), read) == (type(value), value)
