"""JSON of unknown shape."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.json_fields import parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES, st.sampled_from(["", " ", "\n"]), st.sampled_from(["", " ", "\r\n"]))
def test_a_text_is_parsed_as_by_the_standard_library(value: object, before: str, after: str) -> None:
    assert parse(f"{before}{json.dumps(value)}{after}") == value


@pytest.mark.parametrize("text", ["", "{", "{}x", "{} {}", "[1]2", '{"a": }', "x"])
def test_a_text_that_is_not_one_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse(text)
    with pytest.raises(ValueError, match=r".") as expected:
        json.loads(text)
    assert str(raised.value) == str(expected.value)
