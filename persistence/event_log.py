"""The event that each change adds to the history of its run, the same for every store. Pure."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from plait import events
from plait.persistence import changes
from plait.persistence.records import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from plait.persistence.changes import Change
    from plait.usage import Usage


EventParts = tuple[str, str, str | None, int | None, str]
"""The fields of an EventRecord behind `seq`: at, kind, task_id, attempt, detail."""


Parts = tuple[str, EventKind, str | None, int | None, str]


def event_of(change: Change) -> EventParts | None:
    """Return the event of `change`, or None if the change adds no event.

    An event holds no prompt, no result and no policy state. With a growing state in every PolicyDecided, the history
    would grow with the square of the decisions.
    """
    if isinstance(change, events.Event):
        if not change.shown:
            return None
        return events.columns_of(change)
    make = _EVENTS.get(type(change))
    if make is None:
        return None
    at, kind, task_id, attempt, detail = make(change)
    return at, kind._value_, task_id, attempt, detail  # a plain str is bound five times as fast as a StrEnum


def _run_status(change: changes.RunStatusChanged) -> Parts:
    running = EventKind.RUN_RESUMED if change.resumed else EventKind.RUN_STARTED
    kind = running if change.status == "running" else EventKind(f"run_{change.status}")
    return change.at, kind, None, None, "{}"


def _task_completed(change: changes.TaskCompleted) -> Parts:
    return change.at, EventKind.TASK_COMPLETED, change.task_id, change.attempt, completion_detail(change.usage)


def _task_failed(change: changes.TaskFailed) -> Parts:
    kind = EventKind(f"task_{change.status}")
    return change.at, kind, change.task_id, change.attempt, _pair("error_kind", change.error_kind)


def _task_retried(change: changes.TaskRetried) -> Parts:
    values: dict[str, str | float] = {"error_kind": change.error_kind, "delay_s": change.delay_s}
    if change.continues_session:
        values["continues_session"] = True
    detail = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return change.at, EventKind.TASK_RETRIED, change.task_id, change.attempt, detail


def _task_waiting(change: changes.TaskWaiting) -> Parts:
    return change.at, EventKind.TASK_WAITING_INPUT, change.task_id, change.attempt, "{}"


def completion_detail(usage: Usage) -> str:
    """Return the detail of a TaskCompleted event, for a store that derives the event from the attempt.

    Tokens counted apart are named only if there are any, and the cost only if the cost is known.
    """
    if usage.cost_usd is None and not (usage.cache_read_tokens or usage.cache_write_tokens or usage.reasoning_tokens):
        return f'{{"input_tokens":{usage.input_tokens:d},"output_tokens":{usage.output_tokens:d}}}'
    values: dict[str, int | float | bool | None] = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": usage.cache_read_tokens or None,
        "cache_write_tokens": usage.cache_write_tokens or None,
        "reasoning_tokens": usage.reasoning_tokens or None,
        "cost_usd": usage.cost_usd,
        "cost_is_partial": usage.cost_is_partial or None,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return json.dumps(known, allow_nan=False, separators=(",", ":"))


@lru_cache(maxsize=256)
def _pair(key: str, value: str) -> str:
    return json.dumps({key: value}, ensure_ascii=False, separators=(",", ":"))


_EVENTS: dict[type, Callable[..., Parts]] = {
    changes.RunStatusChanged: _run_status,
    changes.TaskCompleted: _task_completed,
    changes.TaskFailed: _task_failed,
    changes.TaskRetried: _task_retried,
    changes.TaskWaiting: _task_waiting,
}
