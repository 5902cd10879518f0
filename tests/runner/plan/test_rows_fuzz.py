"""Whatever stands in a file of rows: what was written comes back, and all else ends in PlanError."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runner.plan import PlanError, PlanProblem, parse_plan


def rows(folder: Path, name: str, data: str | bytes) -> object:
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    text = f"inputs: {{people: {{rows: {name}}}}}\ntasks: [{{id: t, prompt: x}}]\n"
    return parse_plan(text, folder=folder).dag.inputs["people"]


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXTS, part, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40)
@given(values=st.lists(JSON.filter(lambda value: value is not None), min_size=1, max_size=6), pretty=st.booleans())
def test_json_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[object], pretty: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = json.dumps(values, ensure_ascii=pretty, indent=2 if pretty else None)
    lines = "\n".join(json.dumps(value, ensure_ascii=pretty) for value in values)
    assert rows(folder, "p.json", whole) == values
    assert rows(folder, "p.jsonl", lines) == values


@given(
    table=st.lists(
        st.lists(st.text(st.sampled_from('ab",;\t\n\r Ä'), max_size=4), min_size=2, max_size=2), min_size=1
    ).filter(lambda table: any("".join(row).strip() for row in table))
)
def test_tables_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name, dialect in (("p.csv", "excel"), ("p.tsv", "excel-tab")):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, dialect).writerows([["a", "b"], *table])
        data = (folder / name).read_bytes()
        assert rows(folder, name, data) == [{"a": row[0], "b": row[1]} for row in table if "".join(row).strip()]


@given(
    data=st.binary(max_size=60) | st.text(st.sampled_from('[]{}:,"\\ud80\n\r\t -1eNa;'), max_size=60).map(str.encode),
    kind=st.sampled_from([".jsonl", ".ndjson", ".json", ".csv", ".tsv"]),
)
def test_whatever_stands_in_a_file_ends_in_rows_or_mistakes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str
) -> None:
    problems: tuple[PlanProblem, ...] = ()
    try:
        value = rows(tmp_path_factory.getbasetemp(), f"p{kind}", data)
    except PlanError as error:
        problems = error.problems
    else:
        assert isinstance(value, list)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    assert not any("\n" in str(problem) for problem in problems)
