"""What a task is made with."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from plait import Task
from plait.events import NewTask
from plait.json_form import to_json
from plait.runner.state.stored_run import decode_task
from plait.task import Best, Call, Check, FailureMode, Retry, read_spec, write_spec


@pytest.mark.parametrize("prompt", ["", " \n\t", None])
def test_a_task_without_a_prompt_is_refused_when_it_is_made(prompt: str) -> None:
    for made in (
        lambda: Task("a"),
        lambda: Task("a", prompt),
        lambda: Task("a", prompt, depends_on=["b"]),
        lambda: Task("a", prompt, continues="b"),
    ):
        with pytest.raises(ValueError) as caught:
            made()
        assert str(caught.value) == (
            "task 'a': there is no prompt; write one, or name a function that needs none as the `backend`"
        )


def test_a_task_with_a_backend_of_its_own_or_files_needs_no_prompt() -> None:
    assert Task("a", backend="fetch").prompt == ""
    assert Task("a", files=["report.pdf"]).prompt == ""


def test_a_task_stores_the_options_that_differ_from_the_defaults() -> None:
    retry = Retry(on=["timeout"])
    tasks = (Task("x", "p", retry=Retry()), Task("y", "p", failure_mode="soft", retry=retry, aliases={"z": "x"}))
    plain, odd = map(NewTask.of, tasks)
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


def test_an_empty_mapping_of_a_task_is_shared_and_stays_empty() -> None:
    """A run of a million tasks would have four million of them."""
    first, second = Task("a", "p"), Task("b", "p")
    for name in ("aliases", "metadata", "env", "inputs"):
        nothing: Any = getattr(first, name)
        assert nothing is getattr(second, name)
        for change in (nothing.setdefault, nothing.__setitem__):
            with pytest.raises(TypeError, match="not changed in place"):
                change("x", 1)
        with pytest.raises(TypeError, match="not changed in place"):
            nothing.update(x=1)
        assert nothing == {}
        assert json.dumps(nothing) == "{}"
    assert deepcopy(first) == first


def test_a_called_plan_is_read_as_it_was_stored() -> None:
    vote = Best("the shortest", "judge")
    inner = Task("inner", call=Call([Task("x", "x", ("y",), retry=2, check=Check(["true"])), Task("y", run=["ls"])]))
    task = Task("c", call=Call([inner, Task("v", "v", repeat=3, vote=vote)], {"n": 1}, "{{ v }} == 1", 5, {"m": []}))
    again = Task("c", **read_spec(write_spec(task)))
    assert again.call == task.call
    assert task.call is not None
    assert task.call.backends == (None, "command", "judge")
