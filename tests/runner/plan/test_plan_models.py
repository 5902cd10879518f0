"""The published JSON Schema of plan files, beside what the reader takes."""

import json

import pytest

from plait.runner.plan import PlanError, parse_plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"tasks": [{"id": "a"}]},
        {"tasks": [{"id": "a", "prompt": None}]},
        {"tasks": [{"id": ".a", "prompt": "x"}]},
        {"tasks": [{"id": "item", "prompt": "x"}]},
        {"tasks": [{"id": "None", "prompt": "x"}]},
        {"tasks": []},
        {"tasks": [{"id": "a", "prompt": "x"}], "x": 1},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"r": {"required": False}}},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"r": {"files": "*", "most": 3}}},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"r": {"rows": "r.csv", "max_rows": 0}}},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"r": {"rows": "r.csv", "columns": ["a"]}}},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"results": 1}},
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(schema, wrong):
    assert not schema.is_valid(wrong)
    with pytest.raises(PlanError):
        parse_plan(json.dumps(wrong), format="json")


@pytest.mark.parametrize(
    "empty",
    [
        {"tasks": [{"id": "a", "prompt": "x", "depends_on": None, "retry": None, "at_most_once": None}]},
        {"tasks": [{"id": "a", "prompt": "x"}], "name": None, "inputs": None, "defaults": {"failure_mode": None}},
        {"tasks": [{"id": "a", "prompt": "x"}], "inputs": {"r": None, "m": {"a": 1}, "l": [1]}, "follow_ups": None},
    ],
)
def test_the_schema_accepts_a_key_with_nothing_behind_it_as_the_reader_does(schema, empty):
    schema.validate(empty)
    parse_plan(json.dumps(empty), format="json")
