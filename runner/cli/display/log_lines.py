"""The lines of `plait log`. Text of a model stands behind a mark, so that it cannot imitate a line of plait."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from plait.events import (
    BackendThrottled,
    HostAway,
    NodeStarted,
    SessionOpened,
    TaskAdopted,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskPlaced,
    TaskReopened,
    TaskRetried,
    TasksAdded,
    TaskSkipped,
    TaskStarted,
    TaskWaiting,
)
from plait.json_form import JsonValue
from plait.runner.cli.display.waits import wait_line
from plait.runner.cli.terminal_output import as_line, coloured, counted, seconds, tokens, visible
from plait.runner.views.read_views import stored_away, stored_throttling
from plait.runner.views.run_log import RunLogEntry
from plait.statuses import TaskStatus
from plait.usage import dollars

_LONGEST = 300
Detail: TypeAlias = "Mapping[str, JsonValue]"


def entry_lines(entry: RunLogEntry, run_id: str) -> list[str]:
    """Return the lines of `entry`, safe for a terminal; none for internal events."""
    if entry.kind == "output":
        return _output_lines(entry.detail)
    if entry.kind == "message":
        return _message_lines(entry.detail)
    if entry.kind.startswith("run_"):
        return [_run_line(entry, as_line(run_id))]
    if entry.kind in _STORED_WAITS and entry.at is not None:
        return [wait_line(_STORED_WAITS[entry.kind](entry.at, entry.detail))]
    words = _WORDS.get(entry.kind)
    if words is None:
        return []
    line = words(entry.detail)
    if entry.kind == TaskStarted.kind and entry.attempt is not None and entry.attempt > 1:
        line += f", attempt {entry.attempt}"
    return [line]


_STORED_WAITS: Mapping[str, Callable[[str, Detail], BackendThrottled | HostAway]] = {
    BackendThrottled.kind: stored_throttling,
    HostAway.kind: stored_away,
}


def _message_lines(detail: Detail) -> list[str]:
    role = as_line(_text(detail, "role"))
    if detail.get("damaged"):
        return [f"damaged: a message ({role}) does not fit its checksum"]
    return _prefix_lines(f"{role}| ", _text(detail, "content"))


def _output_lines(detail: Detail) -> list[str]:
    kind, text = _text(detail, "output"), _text(detail, "text")
    if kind == "text":
        return _prefix_lines("| ", text)
    return [{"tool": "> ", "waiting": "waits: "}.get(kind, "notice: ") + as_line(text, _LONGEST)]


def _prefix_lines(mark: str, text: str) -> list[str]:
    return [mark + line for line in visible(text).removesuffix("\n").split("\n")]


def _run_line(entry: RunLogEntry, run_id: str) -> str:
    what = as_line(entry.kind.removeprefix("run_"))
    if what == "created":
        return f"run {run_id} created, {counted(_count(entry.detail, 'tasks'), 'task')}"
    return f"run {run_id} {coloured(what.replace('_', ' '), what, sys.stdout)}"


def _end_line(status: TaskStatus, detail: Detail) -> str:
    word = coloured(status.value, status, sys.stdout)
    return " ".join(filter(None, (word, _spent(detail), _error_text(detail))))


def _retry_line(detail: Detail) -> str:
    how = "continues" if detail.get("continues_session") else "tries again"
    line = f"{how} in {seconds(_number(detail, 'delay_s'))}: {_error_text(detail)}"
    return f"{line} ({spent})" if (spent := _spent(detail)) else line


def _interruption_line(detail: Detail) -> str:
    again = f", starts again in {seconds(_number(detail, 'delay_s'))}" if detail.get("delay_s") else ""
    return f"interrupted: {as_line(_text(detail, 'reason'), _LONGEST)}{again}"


def _error_text(detail: Detail) -> str:
    return ": ".join(filter(None, (_text(detail, "error_kind"), as_line(_text(detail, "error"), _LONGEST))))


def _spent(detail: Detail) -> str:
    """Return duration, tokens and cost: `1.2s 310+42 tokens $0.0123`."""
    used = tokens(_count(detail, "input_tokens"), _count(detail, "output_tokens"))
    paid = dollars(_number(detail, "cost_usd"))
    if detail.get("cost_is_partial") is True:
        paid = f"at least {paid}" if paid else "cost unknown"
    return " ".join(filter(None, (seconds(_number(detail, "duration_s")), f"{used} tokens" if used else "", paid)))


def _suffix(text: str) -> str:
    return f": {as_line(text, _LONGEST)}" if text else ""


def _ids(detail: Detail) -> str:
    ids = detail.get("ids")
    return ", ".join(map(str, ids)) if isinstance(ids, list) else ""


def _answer_line(detail: Detail) -> str:
    by = _text(detail, "by")
    return f"answered by {as_line(by)}{_suffix(_text(detail, 'answer'))}" if by else "answered"


def _text(detail: Detail, name: str) -> str:
    found = detail.get(name)
    return found if isinstance(found, str) else ""


def _number(detail: Detail, name: str) -> float | None:
    found = detail.get(name)
    return found if isinstance(found, int | float) else None


def _count(detail: Detail, name: str) -> int:
    return int(_number(detail, name) or 0)


_WORDS: Mapping[str, Callable[[Detail], str]] = {
    TasksAdded.kind: lambda detail: f"{counted(_count(detail, 'tasks'), 'task')} added{_suffix(_ids(detail))}",
    TaskStarted.kind: lambda detail: f"started ({as_line(_text(detail, 'backend'))})",
    TaskAdopted.kind: lambda _: "is taken over: the agent has outlived the process that started it",
    TaskPlaced.kind: lambda detail: f"runs on {as_line(_text(detail, 'place'))}",
    NodeStarted.kind: lambda detail: f"node {as_line(_text(detail, 'node'))}",
    SessionOpened.kind: lambda detail: f"session {as_line(_text(detail, 'session_id'))}",
    TaskCompleted.kind: partial(_end_line, TaskStatus.COMPLETED),
    TaskFailed.kind: partial(_end_line, TaskStatus.FAILED),
    TaskSkipped.kind: partial(_end_line, TaskStatus.SKIPPED),
    TaskCancelled.kind: partial(_end_line, TaskStatus.CANCELLED),
    TaskRetried.kind: _retry_line,
    TaskInterrupted.kind: _interruption_line,
    TaskWaiting.kind: lambda detail: f"waits for a person{_suffix(_text(detail, 'question'))}",
    TaskAnswered.kind: _answer_line,
    TaskReopened.kind: lambda _: "is to run again",
}
