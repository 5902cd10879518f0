"""What cannot be used in a file of rows: what is said of it, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.runner.plan import PlanError, parse_plan
from tests.support.plans.rows import mistakes

WRONG: dict[str, tuple[str, str | bytes, int | None, str]] = {
    "a broken line": ("p.jsonl", '1\n\n{"a" 1}\n', 3, "this is not JSON: Expecting ':' delimiter"),
    "a cut line": ("p.jsonl", '1\n{"a": "b', 2, "this is not JSON: Unterminated string"),
    "two values in a line": (
        "p.jsonl",
        "1\n2 3\n",
        2,
        "more text follows the value; a .jsonl file holds one value per line",
    ),
    "no number": ("p.jsonl", "1\nNaN", 2, "nan is not a number in JSON"),
    "no number within": ("p.jsonl", '{"a": [-Infinity]}', 1, "a[0]: -inf is not a number in JSON"),
    "too large a number": ("p.jsonl", "1\n1e999", 2, "inf is not a number in JSON"),
    "too long a number": (
        "p.jsonl",
        "1\n" + "9" * 5000,
        2,
        "a number has more than 4,300 digits; write it as text",
    ),
    "null": ("p.jsonl", "1\n\nnull\n2\n", 3, "this row is null, and for_each cannot use null; remove the row"),
    "null in a list": (
        "p.json",
        "[1,\n2,\nnull]",
        None,
        "row 3: this row is null, and for_each cannot use null; remove the row",
    ),
    "null for a list": ("p.json", "null", None, "a .json file of rows must hold a list, not nothing"),
    "half a character": ("p.jsonl", '1\n{"a": "\\ud800"}', 2, "a: a text may not hold U+0000 or a lone surrogate"),
    "U+0000": ("p.jsonl", '1\n"\\u0000"', 2, "a text may not hold U+0000 or a lone surrogate"),
    "U+0000 in a key": ("p.jsonl", '1\n{"\\u0000": 1}', 2, "a key may not hold U+0000"),
    "a key twice": ("p.jsonl", '1\n{"a": {"b": 1, "c": 2, "b": 3}}', 2, "key 'b' is given twice"),
    "deep": ("p.jsonl", "1\n" + "[" * 51 + "]" * 51, 2, "this is nested deeper than 50 levels"),
    "very deep": ("p.jsonl", "1\n" + "[" * 200_000, 2, "this is nested deeper than 50 levels"),
    "not UTF-8": ("p.jsonl", b"1\n2\n\xff\n", None, "this is not UTF-8"),
    "UTF-16": ("p.csv", "name\nAda".encode("utf-16"), None, "this is not UTF-8"),
    "a line for Excel": ("p.csv", "sep=,\na,b\n1,2\n", 1, "only Excel reads this line; remove the line"),
    "a line for Excel in quotes": ("p.csv", '"sep=,"\na,b\n', 1, "only Excel reads this line; remove the line"),
    "a line for Excel about others": ("p.csv", "SEP=;\na;b\n", 1, "only Excel reads this line; remove the line"),
    "a line for Excel about tabs": ("p.tsv", "sep=\t\na\tb\n", 1, "only Excel reads this line; remove the line"),
    "two marks": ("p.csv", "\ufeff\ufeffa,b\n1,2\n", 1, "the header begins with U+FEFF, a second byte order mark"),
    "a mistake in a list": ("p.json", '[1,\r\n2,\r\n"x",\r\n{"a" 1}]\r\n', 4, "Expecting ':' delimiter"),
    "no list": (
        "p.json",
        '\n{"a": 1}',
        None,
        "a .json file of rows must hold a list, not a mapping; for one value per line",
    ),
    "lines as a list": ("p.json", "1\n2\n", 2, "more text follows the value; a .jsonl file holds one value per line"),
    "a broken list": ("p.json", "[1,\n2,\n]", 3, "this is not JSON: Expecting value"),
    "a list without an end": ("p.json", "[1,\n2\n", 3, "this is not JSON: Expecting ',' delimiter"),
    "a list without commas": ("p.json", "[1\n2]", 2, "this is not JSON: Expecting ',' delimiter"),
    "more than a list": ("p.json", "[1]\n[2]", 2, "more text follows the value"),
    "no number in a list": ("p.json", '[1,\n{"a":\nNaN}]', None, "row 2: a: nan is not a number"),
    "a deep list": ("p.json", "[1,\n" + "[" * 200_000, 1, "this is nested deeper than 50 levels"),
    "a field too many": ("p.csv", 'a,b\n"x\ny",2\n1,2,3\n', 4, "this row has 3 fields, and the header 2"),
    "a field too few": ("p.tsv", "a\tb\n1\n", 2, "this row has 1 field, and the header 2"),
    "a column without a name": ("p.csv", "a, ,c\n1,2,3\n", 1, "column 2 has no name"),
    "two columns of one name": ("p.csv", "a,b,a\n1,2,3\n", 1, "the header has column 'a' twice"),
    "other separators": ("p.csv", "a;b\n1;2\n", 1, "fields are separated by ';' here; a .csv file has commas"),
    "an open quote": ("p.csv", 'a,b\n1,"2\n3,4\n', 2, "a quote that is opened in this row is never closed"),
    "a quote within": ("p.csv", 'a,b\n1,"2"x\n', 2, "write a quote inside a quoted field twice"),
    "U+0000 in a field": ("p.csv", "a,b\n1,\0\n", 2, "b: a text may not hold U+0000"),
    "U+0000 in a header": ("p.csv", "a,\0\n1,2\n", 1, "a text may not hold U+0000"),
    "too long a field": ("p.csv", "a\n1\n" + "x" * 131_073, 3, "a field has more than 131,072 characters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_told_with_its_line_in_the_file_of_rows(tmp_path: Path, case: str) -> None:
    name, data, line, words = WRONG[case]
    (problem,) = mistakes(tmp_path, name, data)
    assert (problem.file, problem.line, problem.where) == (str(tmp_path / name), line, "inputs.people")
    assert words in problem.message
    assert "\n" not in str(problem)


def test_what_json_says_does_not_break_off(tmp_path: Path) -> None:
    for data, end, said in (('"a\tb"', "}", "Invalid control character"), ('"a', "", "Unterminated string")):
        (problem,) = mistakes(tmp_path, "p.jsonl", data)
        with pytest.raises(PlanError) as caught:
            parse_plan(f'{{"name": {data}{end}', format="json")
        assert problem.message == caught.value.problems[0].message == f"this is not JSON: {said}"


def test_all_wrong_rows_are_told_at_once_up_to_twenty(tmp_path: Path) -> None:
    assert [problem.line for problem in mistakes(tmp_path, "p.jsonl", "x\n1\n[2\n3 4\n")] == [1, 3, 4]
    told = [problem.message[:6] for problem in mistakes(tmp_path, "p.json", "[NaN,\n1,\nNaN]")]
    assert told == ["row 1:", "row 3:"]
    assert [problem.line for problem in mistakes(tmp_path, "p.csv", "a,b\n1\n1,2\n3\n")] == [2, 4]
    *told, last = mistakes(tmp_path, "p.jsonl", "x\n" * 1_000)
    assert [problem.line for problem in told] == list(range(1, 21))
    assert (last.line, last.message) == (20, "20 mistakes so far; the rest was not read")
