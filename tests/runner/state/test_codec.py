"""What is stored for an event, and the JSON of tasks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from plait.dialogue import Message
from plait.runner.state.codec import decode_task, new_task, to_json
from plait.task import FailureMode, Retry, Task
from plait.usage import Usage

MESSAGES = (Message("user", "hi"), Message("assistant", "ho", Usage(5, 6)))
AT = "2026-11-25T00:00:00.000Z"


def test_a_task_stores_the_options_that_differ_from_the_defaults() -> None:
    retry = Retry(on=["timeout"])
    tasks = (Task("x", "p", retry=Retry()), Task("y", "p", failure_mode="soft", retry=retry, aliases={"z": "x"}))
    plain, odd = map(new_task, tasks)
    assert plain.spec == "{}"
    assert set(json.loads(odd.spec)) == {"failure_mode", "retry", "aliases"}
    assert replace(decode_task(odd), depends_on=()) == tasks[1]
    assert decode_task(odd).failure_mode is FailureMode.SOFT


def test_json_keeps_what_utf_8_cannot_hold_as_an_escape() -> None:
    assert to_json({"ä": ["ö", None, 1.5]}) == '{"ä":["ö",null,1.5]}'
    assert to_json("a\ud800ä") == '"a\\ud800\\u00e4"'
    for value in (float("nan"), float("inf"), [float("nan"), "\ud800"]):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(value)
