"""JSON of unknown shape."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.json_fields import counted, parse
from plait.usage import Usage

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


def test_no_part_of_a_usage_is_larger_than_its_whole() -> None:
    odd = counted(10, 5, 0.5, model="m", cache_read=7, cache_write=9, cache_write_1h=8, reasoning=6)
    assert odd == Usage(
        10,
        5,
        0.5,
        "m",
        cache_read_tokens=7,
        cache_write_tokens=3,
        cache_write_1h_tokens=3,
        reasoning_tokens=5,
    )
    assert counted(10, 5, cache_read=11, cache_write=1) == Usage(10, 5, cache_read_tokens=10)
    assert counted(10, 5, cache_read=4, cache_write=6, cache_write_1h=2, reasoning=5) == Usage(
        10, 5, cache_read_tokens=4, cache_write_tokens=6, cache_write_1h_tokens=2, reasoning_tokens=5
    )
