"""Reading plan files: which values come out, which traps are closed, and where the mistakes are."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import PlanError
from plait.runner.plan.plan_positions import read_source


def problems(data, **options):
    """Every mistake as (line, column, path, message)."""
    try:
        found = read_source(data, **options).problems
    except PlanError as error:
        found = error.problems
    return [(problem.line, problem.column, problem.where, problem.message) for problem in found]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("false", False), ("null", None), ("", None), ("0", 0), ("12", 12), ("-3", -3), ("1.5", 1.5),
        ("-0.25", -0.25),
    ]
    + [(text, text) for text in (
        "no", "yes", "on", "off", "True", "FALSE", "Null", "~", "012", "0x1f", "0o7", "1:30", "1.10", "1e3", "1_000",
        "-0", "+1", ".5", "5.", ".inf", ".nan", "2026-11-21", "2026-11-21T10:00:00Z", "=", "12345678901234567890",
    )],
)  # fmt: skip
def test_plain_scalars(text, value):
    found = read_source(f"key: {text}").value
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


@pytest.mark.parametrize("quoted", ["'5'", '"5"', "|-\n  5", ">-\n  5"])
def test_quoted_scalars_are_text(quoted):
    assert read_source(f"key: {quoted}").value == {"key": "5"}


def test_keys_are_text():
    assert read_source("1: a\ntrue: b\nnull: c\nno: d\n<<: e").value == {
        "1": "a", "true": "b", "null": "c", "no": "d", "<<": "e"
    }  # fmt: skip


def test_places():
    source = read_source("a: 1\ntasks:\n  - id: x\n    prompt: |\n      one\n      two\n")
    assert source.values["tasks", 0, "id"] == (3, 9)
    assert source.keys["tasks", 0, "prompt"] == (4, 5)
    source.complain(("tasks", 0, "prompt"), "bad", line=2)
    source.complain(("tasks", 0, "missing"), "bad")
    source.complain(("tasks", 0, "id", 0), "bad")
    assert [str(problem) for problem in source.problems] == [
        "plan:6:1: tasks[0].prompt: bad",
        "plan:3:5: tasks[0].missing: bad",
        "plan:3:9: tasks[0].id: bad",
    ]


def test_every_trap_is_reported_with_its_place():
    text = "a: 1\na: 2\nb: &anchor [1]\nc: *anchor\nd: !!python/object/apply:os.system [ls]\n? [x]\n: y\n"
    found = problems(text)
    assert [(line, column, where) for line, column, where, _ in found] == [
        (2, 1, "a"), (3, 4, "b"), (4, 4, "c"), (5, 4, "d"), (6, 3, ""),
    ]  # fmt: skip
    words = ["'a' is given twice; the first is in line 1", "anchors (&anchor)", "aliases (*anchor)", "tags (", "key"]
    assert all(word in message for word, (*_, message) in zip(words, found, strict=True))


def test_alias_bomb_is_refused_without_being_built():
    text = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))
    assert len(problems(text)) == 8 + 14


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        ("a: 1\n---\nb: 2", 2, "one document"),
        ("a: 1\nb: c: d", 2, "not YAML"),
        ("a:\n\t- b", 2, "spaces, not with tabs"),
        ("a: 1\nb: \x00", 2, "U+0000"),
        ("a: 1\nb: x\x1b[31m", 2, "U+001B"),
        ("a: 1\nb: \ud800", 2, "U+D800"),
        ('a: 1\nb: "\\0"', 2, "U+0000"),
        ('a: 1\n"\\0": 1', 1, "U+0000"),
        (b"a: 1\nb: \xff\xfe", 2, "not UTF-8"),
        ("[" * 5000, 1, "nested deeper than 50"),
        ("".join(" " * n + "a:\n" for n in range(60)), 51, "nested deeper than 50"),
        ("a: " + "x" * 1024 * 1024, None, "1 MiB"),
    ],
    ids=range(12),
)
def test_unreadable_yaml(data, line, words):
    (found,) = problems(data)
    assert found[0] == line
    assert words in found[3]


def test_byte_order_mark_and_empty_files():
    assert read_source(b"\xef\xbb\xbfa: 1").value == {"a": 1}
    assert read_source("").value is None
    assert read_source("# only a comment").value is None


def test_json():
    text = '{\n\t"a": 1.10, "b": "\\ud83d\\ude00 \\/",\n\t"c": {"d": [1e3, null]}\n}'
    source = read_source(text, format="json")
    assert source.value == {"a": 1.1, "b": "😀 /", "c": {"d": [1000.0, None]}}
    assert source.problems == []
    assert source.values["c", "d", 1] == (3, 19)


@settings(max_examples=40)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0\x7f", exclude_categories=["Cc", "Cs", "Cn"])),
    lambda part: st.lists(part) | st.dictionaries(st.text("abc"), part),
))  # fmt: skip
def test_any_json_is_read_as_json(value):
    for options in ({}, {"indent": "\t"}, {"ensure_ascii": False}):
        source = read_source(json.dumps(value, **options), format="json")
        assert source.value == value
        assert source.problems == []


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"a": 1,\n "a": 2}', 2, "'a' is given twice"),
        ('{\n"a": }', 2, "not JSON"),
        ('{\n"a": NaN}', 2, "nan is not a number"),
        ("[" * 100_000, None, "nested deeper"),
        ("[" * 60 + "]" * 60, 1, "nested deeper"),
        ("9" * 5000, None, "a number has more than 4,300 digits; write it as text, in quotes"),
    ],
    ids=range(6),
)
def test_unreadable_json(text, line, words):
    (found,) = problems(text, format="json")
    assert found[0] == line
    assert words in found[3]


def test_toml():
    source = read_source('a = 1.10\nd = 2026-11-21\n[[tasks]]\nid = "x"\n', format="toml")
    assert source.value == {"a": 1.1, "d": "2026-11-21", "tasks": [{"id": "x"}]}
    source.complain(("tasks", 0, "id"), "bad")
    assert [str(problem) for problem in source.problems] == ["plan: tasks[0].id: bad"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a = 1\na = 2\nb = 1", 2, "not TOML"),
        ("a = " + "9" * 5000, None, "a number has more than 4,300 digits; write it as text, in quotes"),
        ("a = nan", None, "nan is not a number"),
        ("a = " + "[" * 5000, None, "nested deeper"),
        ("a = " + "[" * 60 + "]" * 60, None, "nested deeper"),
    ],
    ids=range(5),
)
def test_unreadable_toml(text, line, words):
    (found,) = problems(text, format="toml")
    assert found[0] == line
    assert words in found[3]
