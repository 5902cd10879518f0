"""`plait log`: print the history of a run, with the output of its agents."""

from __future__ import annotations

import json
import select
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

import anyio

from plait.clock_and_ids import iso
from plait.events import TaskCancelled, TaskCompleted, TaskFailed, TaskSkipped
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import CANCELLED, COMPLETED, FAILED, subcommand
from plait.runner.cli.command_options import LOG
from plait.runner.cli.run_report import STATUS_CODES
from plait.runner.cli.terminal_output import as_line, coloured, output, print_line, print_next, print_note, visible
from plait.runner.client.runs import find_run
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.state.stored_run import listed_tasks
from plait.runner.views.event_sentences import sentence, short
from plait.runner.views.read_views import find_task, task_views
from plait.runner.views.run_log import RunLog, RunLogEntry
from plait.statuses import RUN_DONE, RunStatus


@subcommand("log", LOG)
async def log_command(
    run: str, task: str | None, follow: bool, lines: int | None, store_path: StorePlace, as_json: bool
) -> int:
    """Print the history of RUN (an id, the beginning of an id, or `last`), or of TASK in the run: each event with its
    time and cost, and between the events the output of agents and the messages of conversations.

    With --follow, print events as they happen until the run has ended; the exit code is that of the run. An agent whose
    plait was killed is followed as well. If no process works on the run any more, the exit code is 6. With --json, each
    line is a JSON object. With -n and --follow, print the last N lines, then those that are added.
    """
    async with open_store(store_path, "read") as store:
        record = await find_run(store, run)
        if task is not None:
            await find_task(store, record, task)
        with closing(RunLog(store, record.run_id, task)) as run_log:
            log = _LogPrinter(run_log, record, task, lines, as_json)
            if follow:
                return await _follow(log, store, store_path)
            await log.catch_up()
            log.finish()
            if not as_json:
                async for line in _waits(store, record, task):
                    log.print_line(line)
            log.print_tail()
            return COMPLETED


_POLL_SECONDS = 0.2  # seconds
_POLLS_PER_RECORD = 5  # reading the record of a run counts its tasks
_COLUMN = 12
_MOST_WAITING = 10  # tasks
_END_CODES: Mapping[str, int] = {
    TaskCompleted.kind: COMPLETED,
    TaskSkipped.kind: COMPLETED,
    TaskFailed.kind: FAILED,
    TaskCancelled.kind: CANCELLED,
}


async def _waits(store: Store, run: RunRecord, only: str | None) -> AsyncGenerator[str]:
    """Yield the reason of each task that is not running, of a run that has not ended."""
    if RunStatus(run.status) in RUN_DONE:
        return
    tasks = await task_views(store, run, await listed_tasks(store, run), time.time(), only)
    waiting = [(task.task_id, task.waits.text) for task in tasks.values() if task.waits is not None]
    for task_id, text in waiting[:_MOST_WAITING]:
        yield f"{'':<8}  {as_line(task_id):<{_COLUMN}}  {as_line(text)}"
    if len(waiting) > _MOST_WAITING:
        yield f"{'':<8}  and {len(waiting) - _MOST_WAITING:,} more tasks that wait"


def _entry_lines(entry: RunLogEntry, run_id: str) -> list[str]:
    """Return the lines of `entry`, safe for a terminal; none for internal events. Text of a model stands behind a mark,
    so that it cannot imitate a line of plait.
    """
    detail: Mapping[str, Any] = entry.detail
    if entry.kind == "output":
        if detail["output"] == "text":
            return _marked("| ", detail["text"])
        mark = {"tool": "> ", "waiting": "waits: "}.get(detail["output"], "notice: ")
        return [mark + as_line(short(detail["text"]))]
    if entry.kind == "message":
        role = as_line(detail["role"])
        if detail.get("damaged"):
            return [f"damaged: a message ({role}) does not fit its checksum"]
        return _marked(f"{role}| ", detail["content"])
    facts = {"run_id": run_id, "at": entry.at, "attempt": entry.attempt, **detail}
    line = as_line(sentence(entry.kind, facts))
    status = entry.kind.partition("_")[2]
    word = status.replace("_", " ")
    if line.startswith(word):
        line = coloured(word, status) + line.removeprefix(word)
    elif line.endswith(f" {word}"):
        line = line.removesuffix(word) + coloured(word, status)
    return [line] if line else []


def _marked(mark: str, text: str) -> list[str]:
    return [mark + line for line in visible(text).removesuffix("\n").split("\n")]


class _LogPrinter:
    """Prints the log of a run, or of its task `task_id`, up to its present end; at first the last `lines`."""

    def __init__(self, run_log: RunLog, run: RunRecord, task_id: str | None, lines: int | None, as_json: bool) -> None:
        self.run_log = run_log
        self.run = run
        self.task_id = task_id
        self.task_code: int | None = None
        """Exit code of the followed task, once the task has ended."""
        self.is_read = True
        self._as_json = as_json
        self._tail = None if lines is None else deque[str](maxlen=min(lines, sys.maxsize))
        """The last lines, not printed yet; None if each line is printed at once."""
        self._is_live = False
        self._day = ""

    async def catch_up(self) -> None:
        """Print all entries up to now."""
        async for entry in self.run_log.more():
            self._print_entry(entry)
        self._is_live = True

    def finish(self) -> None:
        """Print the remaining entries after the last event."""
        for entry in self.run_log.rest():
            self._print_entry(entry)

    def _print_entry(self, entry: RunLogEntry) -> None:
        if self.task_id is not None and entry.seq is not None:
            self.task_code = _END_CODES.get(entry.kind)
        if entry.at is None and self._is_live:  # printed the moment it happens
            entry = replace(entry, at=iso(time.time()))
        if self._as_json:
            self.print_line(json.dumps(asdict(entry)).replace("\x7f", "\\u007f"))
            return
        clock = self._time_of_day(entry.at)
        task = as_line(entry.task_id or "")
        column = "" if self.task_id is not None or not task else f"{task:<{_COLUMN}}  "
        for line in _entry_lines(entry, self.run.run_id):
            self.print_line(f"{clock:<8}  {column}{line}".rstrip())
            clock = ""

    def _time_of_day(self, at: str | None) -> str:
        """Return the local time of day. Print a line with the date first if a new day has begun."""
        if at is None:
            return ""
        local = datetime.fromisoformat(at).astimezone()
        if self._day != (day := f"{local:%Y-%m-%d}"):
            self._day = day
            self.print_line(f"-- {day} --")
        return f"{local:%H:%M:%S}"

    def print_line(self, line: str) -> None:
        """Print the line, or keep it for `print_tail`."""
        if self._tail is not None:
            self._tail.append(line)
        else:
            self.is_read = self.is_read and print_line(line)

    def print_tail(self) -> None:
        """Print the kept lines. Later lines are printed at once."""
        kept, self._tail = self._tail or (), None
        for line in kept:
            self.print_line(line)


async def _follow(log: _LogPrinter, store: Store, path: StorePlace) -> int:
    """Print entries until the run has ended. Return the exit code."""
    looks, run, over = 0, log.run, False
    while log.is_read and not _reader_is_gone():
        was_over = over
        if was_over or looks % _POLLS_PER_RECORD == 0:
            run = await find_run(store, log.run.run_id)
            over = not _is_active(run, log.run_log)
        looks += 1
        await log.catch_up()
        log.print_tail()
        if log.task_code is not None:
            return log.task_code
        # Checked twice: a run may end between reading its record and looking at its process, and would seem to have
        # died.
        if over and was_over:
            log.finish()
            return _print_end(run, path)
        await anyio.sleep(0 if over else _POLL_SECONDS)
    return CANCELLED


def _is_active(run: RunRecord, run_log: RunLog) -> bool:
    """Return whether a process works on the run."""
    status = shown_status(run)
    if status is RunStatus.INTERRUPTED:
        return run_log.is_at_work
    return status not in RUN_DONE | {RunStatus.WAITING_INPUT, RunStatus.PARKED}


def _print_end(run: RunRecord, path: StorePlace) -> int:
    status = shown_status(run)
    further = {RunStatus.INTERRUPTED: "resume", RunStatus.WAITING_INPUT: "answer", RunStatus.PARKED: "wake"}.get(status)
    if further is not None:
        print_note(f"run {run.run_id} is {status.value.replace('_', ' ')}, and no process works on it")
        print_next(path, further, *([] if further == "wake" else [run.run_id]))
    return STATUS_CODES.get(status, CANCELLED)


def _reader_is_gone() -> bool:
    """Return whether the reader of standard output has closed its end."""
    try:
        poll = select.poll()
        poll.register(output().fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False
