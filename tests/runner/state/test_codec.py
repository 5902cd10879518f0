"""Every value of an event that a store records arrives in the change of the same meaning."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from plait import events
from plait.dialogue import Message
from plait.persistence import changes as stored
from plait.runner.domain.task import FailureMode, Retry, Task
from plait.runner.state.codec import decode_task, encode_event, new_task, to_json
from plait.statuses import TaskStatus
from plait.usage import Usage

MESSAGES = (Message("user", "hi"), Message("assistant", "ho", Usage(5, 6)))
VALUES: dict[str, Any] = {
    "at": "2026-11-25T00:00:00.000Z",
    "task_id": "t",
    "attempt": 7,
    "backend": "b",
    "session_id": "s",
    "place": "m3",
    "interrupted": True,
    "confirmed": True,
    "text": "answer",
    "data": [1],
    "data_json": "[1]",
    "usage": Usage(1, 2, 0.5, "m"),
    "duration_s": 1.5,
    "turn": "prompt",
    "taken_from": ("r", "t", 7),
    "like": "r",
    "status": TaskStatus.SKIPPED,
    "error_kind": "auth",
    "error": "no key",
    "delay_s": 2.5,
    "messages": MESSAGES,
    "continues_session": True,
    "traceback": "Traceback",
    "reason": "stopped",
    "crashed": True,
    "question": "Which?",
    "asked": "{}",
    "answers": "[]",
    "tasks": (events.NewTask("x", "p"),),
    "added_by": "t",
    "state": {},
    "state_json": "{}",
    "damaged": True,
    "prompt": "prompt",
}
ALIASES = {"usage": Usage(1, 2, 0.5, "m"), "data": "[1]", "prompt": "prompt", "state": "{}", "asked": "{}"}
EVENTS = {
    events.TaskStarted: stored.TaskStarted,
    events.TaskCompleted: stored.TaskCompleted,
    events.TaskRetried: stored.TaskRetried,
    events.TaskSkipped: stored.TaskFailed,
    events.TaskWaiting: stored.TaskWaiting,
    events.TaskAnswered: stored.TaskAnswered,
    events.PolicyDecided: stored.PolicyDecided,
    events.TaskCancelled: stored.TaskCancelled,
    events.TaskReopened: stored.TaskReopened,
}


def event_of(kind: Any, **other: Any) -> Any:
    return kind(**{field.name: {**VALUES, **other}[field.name] for field in fields(kind) if field.init})


@pytest.mark.parametrize("kind", EVENTS)
def test_each_value_is_stored(kind: type[events.Event]) -> None:
    *said, change = encode_event(event_of(kind))
    assert type(change) is EVENTS[kind]
    expected = {**VALUES, **ALIASES, "status": "skipped"}
    for field in fields(change):
        assert getattr(change, field.name) == expected[field.name], field.name
    assert said == (
        [
            stored.MessageAppended(VALUES["at"], "t", 7, "user", "hi"),
            stored.MessageAppended(VALUES["at"], "t", 7, "assistant", "ho", 5, 6),
        ]
        if "messages" in {field.name for field in fields(kind)}
        else []
    )


def test_a_task_stores_the_options_that_differ_from_the_defaults() -> None:
    retry = Retry(on=["timeout"])
    tasks = (Task("x", "p", retry=Retry()), Task("y", "p", failure_mode="soft", retry=retry, aliases={"z": "x"}))
    plain, odd = map(new_task, tasks)
    assert plain.spec == "{}"
    assert set(json.loads(odd.spec)) == {"failure_mode", "retry", "aliases"}
    assert replace(decode_task(odd), depends_on=()) == tasks[1]
    assert decode_task(odd).failure_mode is FailureMode.SOFT


def test_a_turn_of_several_messages_is_stored_as_messages() -> None:
    first, second, completed = encode_event(event_of(events.TaskCompleted, turn=MESSAGES))
    assert (first, second) == (
        stored.MessageAppended(VALUES["at"], "t", 7, "user", "hi"),
        stored.MessageAppended(VALUES["at"], "t", 7, "assistant", "ho", 5, 6),
    )
    assert isinstance(completed, stored.TaskCompleted)
    assert (completed.prompt, completed.text, completed.data) == (None, "answer", "[1]")


def test_json_keeps_what_utf_8_cannot_hold_as_an_escape() -> None:
    assert to_json({"ä": ["ö", None, 1.5]}) == '{"ä":["ö",null,1.5]}'
    assert to_json("a\ud800ä") == '"a\\ud800\\u00e4"'
    for value in (float("nan"), float("inf"), [float("nan"), "\ud800"]):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(value)
