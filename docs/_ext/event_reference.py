"""Put the tables of statuses and of events, from the code and its docstrings, into the page of statuses and events."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING

from docstrings import about, of_fields
from markers import replace_markers, table

from plait import events
from plait.statuses import (
    RUN_DONE,
    RUN_TRANSITIONS,
    TASK_DONE,
    TASK_TRANSITIONS,
    AttemptStatus,
    RunStatus,
    TaskStatus,
    Transition,
)

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_COMMON = {"at", "run_id", "task_id", "attempt"}
_BEGINNINGS = {
    events.RunCreated.kind: RunStatus.QUEUED,
    events.RunStarted.kind: RunStatus.RUNNING,
    events.RunResumed.kind: RunStatus.RUNNING,
}


def task_statuses() -> str:
    """Return a table with a row for each status of a task."""
    return _statuses("task status", TaskStatus, next_statuses(TASK_TRANSITIONS, TASK_DONE))


def run_statuses() -> str:
    """Return a table with a row for each stored status of a run."""
    return _statuses("run status", RunStatus, next_statuses(RUN_TRANSITIONS, RUN_DONE))


def next_statuses(
    transitions: Mapping[str, Transition[TaskStatus]] | Mapping[str, Transition[RunStatus]], done: Collection[str]
) -> dict[str, set[str]]:
    """Return the statuses that may follow each status without a person who reopens what has ended."""
    moves = [(str(old), str(after)) for before, after in transitions.values() for old in before]
    statuses = {status for move in moves for status in move}
    return {
        status: {after for old, after in moves if old == status and status not in {*done, after}} for status in statuses
    }


def _statuses(heading: str, kind: type[StrEnum], after: Mapping[str, set[str]]) -> str:
    texts = of_fields(kind)
    rows = [
        (f"`{one}`", ", ".join(f"`{status}`" for status in kind if status in after[one]) or "nothing", texts[one.name])
        for one in kind
        if one in after
    ]
    return table([heading, "may become", "meaning"], rows)


def attempt_statuses() -> str:
    """Return a table with a row for each status of an attempt."""
    texts = of_fields(AttemptStatus)
    return table(["attempt status", "meaning"], [(f"`{one}`", texts[one.name]) for one in AttemptStatus])


def stored_events() -> str:
    """Return a table with a row for each kind of stored event."""
    return table(
        ["stored event", "the run is now", "when"],
        [(f"`{kind}`", _run_status(kind), about(one)) for kind, one in events.EVENTS.items() if kind in events.HISTORY],
    )


def _run_status(kind: str) -> str:
    if not kind.startswith("run_") or kind == events.RunInterrupted.kind:  # the run keeps its status
        return ""
    return f"`{_BEGINNINGS.get(kind) or RunStatus(kind.removeprefix('run_'))}`"


def live_events() -> str:
    """Return a table with a row for each event of a live run, in the order of the code."""
    told = [one for one in events.EVENTS.values() if one.shown]
    rows = [(f"`{kind.__name__}`", _fields(kind), about(kind) + _missing(kind)) for kind in told]
    return table(["event", "further fields", "when"], rows)


def _fields(kind: type[events.Event]) -> str:
    return ", ".join(f"`{one.name}`" for one in fields(kind) if one.name not in _COMMON)


def _missing(kind: type[events.Event]) -> str:
    return "" if {"run_id", "task_id"} & {one.name for one in fields(kind)} else " No `run_id`."


def setup(app: Sphinx) -> dict[str, bool]:
    texts = {
        "statuses of tasks": task_statuses,
        "statuses of runs": run_statuses,
        "statuses of attempts": attempt_statuses,
        "stored events": stored_events,
        "events of a live run": live_events,
    }
    return replace_markers(app, texts)
