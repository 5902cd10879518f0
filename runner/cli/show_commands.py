"""`plait show`, `plait log`, `plait diff` and `plait graph`: look at a run or one of its tasks, at its history with the
output of its agents, at two runs, or at a picture.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import anyio
import click

from plait.clock_and_ids import iso, parse_time
from plait.events import TaskCancelled, TaskCompleted, TaskFailed, TaskSkipped
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import MessageRecord, RunRecord, TaskRecord
from plait.runner.cli.command_line import CANCELLED, COMPLETED, FAILED, read_plan, subcommand
from plait.runner.cli.command_options import DIFF, GRAPH, LOG, SHOW
from plait.runner.cli.run_report import STATUS_CODES, question_facts, words_to_continue
from plait.runner.cli.terminal_output import (
    as_line,
    coloured,
    command_line,
    output,
    print_field,
    print_json,
    print_line,
    print_next,
    print_note,
    print_section,
    print_table,
    visible,
    write_file,
)
from plait.runner.client.runs import find_run
from plait.runner.domain.dag import DAG, group_of, groups_of
from plait.runner.drawing.dag_picture import Look, fold, mermaid, page, svg
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.policies.step_workflow import Workflow
from plait.runner.reuse.earlier_answers import KEPT, REUSED, ReuseFrom
from plait.runner.state.stored_run import (
    MOST_LISTED,
    POSTED,
    chosen_tasks,
    decode_dag,
    listed_tasks,
    read_settings,
    rows_file_of,
    stored_run,
    stores_backends,
)
from plait.runner.views.event_sentences import (
    counted,
    event_sentence,
    failure,
    seconds,
    sentence,
    short,
    spent_cells,
    throttling,
    tokens,
)
from plait.runner.views.read_views import find_task, run_detail, task_detail, task_views, waiting_tasks
from plait.runner.views.run_differences import Piece, TaskDifference, compare_runs
from plait.runner.views.run_log import RunLog, RunLogEntry
from plait.runner.views.view_models import (
    AttemptView,
    RunDetail,
    TaskDetail,
    TaskView,
    view_json,
)
from plait.statuses import RUN_DONE, URGENT, RunStatus, TaskStatus, group_status
from plait.usage import NO_USAGE, Usage, cost, token_parts

_SETTINGS = ("model", "temperature")
"""Settings of a task in place of those of its backend, beside the system prompt."""


@subcommand("show", SHOW)
async def show_command(run: str, task: str | None, store_path: StorePlace, as_json: bool, **chosen: Any) -> None:
    """Show RUN with its tasks, or TASK in RUN with its prompt, conversation, result and attempts. More than ten parts
    of a `for_each` are shown as a group, with the failed parts and those that ask.
    """
    statuses, pattern = frozenset(map(TaskStatus, chosen["statuses"])), chosen["pattern"]
    if task is not None:
        await _show_task(store_path, run, task, as_json)
    else:
        await _show_run(store_path, run, as_json, statuses, pattern)


_LONGEST_ERROR = 120
_FEWEST_FOLDED = 11  # parts
_MOST_NAMED = 10  # failed parts of a group


async def _show_run(
    path: StorePlace, word: str, as_json: bool, statuses: Collection[TaskStatus], pattern: str | None
) -> None:
    """Print the run that `word` names, with its tasks in one of `statuses`, whose ids fit `pattern`, if given."""
    async with open_store(path, "read") as store:
        run = await find_run(store, word)
        if statuses or pattern is not None:
            tasks = await chosen_tasks(store, run, lambda task: _fits(task, statuses, pattern))
        else:
            tasks = await listed_tasks(store, run)
        views = await task_views(store, run, tasks, time.time())
        detail = await run_detail(store, run, tasks, time.time())
        is_reuse = not as_json and ReuseFrom.of_settings(read_settings(run)) is not None
        attempts = await store.list_attempts(run.run_id) if is_reuse else ()
        reused = {one.task_id for one in attempts if one.backend.startswith((REUSED, KEPT))}
    shown_tasks = {task.task_id: task for task in views.values() if _fits(task, statuses, pattern)}
    if as_json:
        print_json({**view_json(detail), "tasks": list(shown_tasks.values()), "settings": read_settings(run)})
        return
    _print_run(detail, read_settings(run), tasks, reused)
    is_whole = not statuses and pattern is None
    if shown_tasks or is_whole:
        _print_tasks(shown_tasks, folded=is_whole)
    else:
        print_line("no task matches")
    if rows_file_of(run) is not None:
        which = "last" if is_whole else "first fitting"
        print_line(f"\nat most the {which} {MOST_LISTED:,} tasks of a run with so many rows; all in a file:")
        print_line(command_line(path, "export", run.run_id, "--to", "results.csv"))
    stops = detail.status in {RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT}
    further = {
        ("answer", run.run_id): any(task.status is TaskStatus.WAITING_INPUT for task in views.values()),
        ("resume", run.run_id): stops and stores_backends(run),
        ("wake",): detail.status is RunStatus.PARKED,
    }
    next_commands = [words for words, fits in further.items() if fits]
    if next_commands:
        print_line("")
    for words in next_commands:
        print_line(f"{words[0]:<9} {command_line(path, *words)}")


def _fits(task: TaskRecord | TaskView, statuses: Collection[TaskStatus], pattern: str | None) -> bool:
    """Return whether the task has one of `statuses` and an id that fits `pattern`, if given."""
    has_status = not statuses or TaskStatus(task.status) in statuses
    return has_status and (pattern is None or fnmatchcase(task.task_id, pattern))


def _print_tasks(tasks: Mapping[str, TaskView], *, folded: bool) -> None:
    """Print a line for each task; if `folded`, large groups of parts are a line each, before their urgent parts."""
    each = ((task.task_id, task.spec.get("item"), task) for task in tasks.values())
    groups: Mapping[str, Sequence[TaskView]] = {}
    if folded:
        groups = groups_of(each, _FEWEST_FOLDED)
    added_by = ("ADDED BY",) if any(task.added_by is not None for task in tasks.values()) else ()
    rows: list[tuple[str, ...]] = [("TASK", "STATUS", "TRIES", "TIME", "TOKENS", "COST", *added_by, "")]
    statuses: list[str | None] = [None]
    shown: set[str] = set()

    def add(cells: tuple[str, ...], by: str | None, status: TaskStatus) -> None:
        *first, note = cells
        rows.append((*first, *(as_line(by or "") for _ in added_by), note))
        statuses.append(status)

    for task in tasks.values():
        name = group_of(task.task_id, task.spec.get("item"))
        if name is None or name not in groups:
            add(_task_row(task), task.added_by, task.status)
        elif name not in shown:
            shown.add(name)
            shown_as, counts = group_status(part.status for part in groups[name])
            add(_group_row(name, groups[name], counts), task.added_by, shown_as)
            urgent = [part for part in groups[name] if part.status in URGENT]
            for part in urgent[:_MOST_NAMED]:
                add(_task_row(part), "", part.status)
            if len(urgent) > _MOST_NAMED:
                more = f"and {len(urgent) - _MOST_NAMED:,} more: --task '{name}.*' --status {urgent[-1].status.value}"
                add(("", "", "", "", "", "", more), "", urgent[-1].status)
    print_table(rows, 1, statuses, frozenset({2, 3, 4, 5}))


def _group_row(name: str, parts: Sequence[TaskView], counts: str) -> tuple[str, ...]:
    usage = sum((part.usage for part in parts), NO_USAGE)
    pending = [part.waits for part in parts if part.waits is not None and part.status is TaskStatus.PENDING]
    waits = Counter(text for one in pending if (text := one.own_text(time.time())))
    why = [f"{number:,} {text}" for text, number in waits.most_common(1)]
    return (
        as_line(f"{name}.*"),
        f"{len(parts):,} parts",
        str(sum(part.attempts for part in parts) or ""),
        "",
        *spent_cells(usage),
        "; ".join([counts, *why]),
    )


def _print_run(
    run: RunDetail,
    settings: Mapping[str, Any],
    tasks: Sequence[TaskRecord],
    reused: Collection[str],
) -> None:
    """Print the run; the tasks in `reused` have an answer of an earlier run."""
    status, owner, plan = run.status, run.owner, settings.get("plan")
    print_field("run", run.run_id)
    print_field("name", run.name)
    print_line(f"{'status':<9} {coloured(run.status_text, status)}, {run.progress}")
    print_field("reason", run.reason if status in {RunStatus.INTERRUPTED, RunStatus.PARKED} else None)
    print_field("error", run.error)
    if (loop := run.loop) is not None:
        print_field("goal", loop.description)
        print_field("stopped", loop.why_stopped)
    print_field("backends" if settings.get(POSTED) else "plan", plan if isinstance(plan, str) else None)
    reuse = ReuseFrom.of_settings(settings)
    print_field("parent", None if reuse is None else reuse.description)
    print_field("reused", f"{counted(len(reused), 'result')} of the parent, at no cost" if reused else None)
    key = settings.get("key")
    print_field("key", key if isinstance(key, str) else None)
    print_field("created", run.created_at)
    print_field("ended", run.ended_at)
    print_field("owner", owner.process if owner and status is RunStatus.RUNNING else None)
    for change in run.tuned:
        print_field("tuned", event_sentence(change))
    for one in run.throttled:
        print_field("throttled", throttling(one, time.time()))
    _print_usage(run.usage)
    print_field("budget", None if run.budget is None else run.budget.description)
    models = Counter(task.usage.model for task in tasks if task.usage.model is not None)
    each = (f"{name} ({counted(number, 'task')})" for name, number in models.most_common())
    print_field("model", next(iter(models)) if len(models) == 1 else ", ".join(each))
    print_line("")


def _print_usage(usage: Usage, later: str = "") -> None:
    """Print tokens and cost; `later` are the tokens of turns after the run."""
    used, parts = tokens(usage), token_parts(usage)
    print_field("tokens", f"{used} ({parts})" if parts else used)
    if later:
        print_line(f"{'':<9} and {later} in turns after the run, not included above")
    named = f" for model {usage.model}" if usage.cost_is_unknown and usage.model else ""
    print_field("cost", spent_cells(usage)[1] + named)


def _task_row(task: TaskView) -> tuple[str, ...]:
    error = failure(task.error_kind, task.error) if task.question is None else f"asks: {task.question}"
    why = "" if task.waits is None else as_line(task.waits.own_text(time.time()))
    note = "; ".join(filter(None, (as_line(error, _LONGEST_ERROR), why)))
    return (
        as_line(task.task_id),
        task.status.value,
        str(task.attempts or ""),
        seconds(task.duration_s),
        *spent_cells(task.usage),
        "the stored result is damaged" if task.damaged else note,
    )


async def _show_task(path: StorePlace, word: str, task_id: str, as_json: bool) -> None:
    """Print a task: its prompt, conversation, result and attempts."""
    async with open_store(path, "read") as store:
        run = await find_run(store, word)
        detail = await task_detail(store, run, task_id, time.time())
        waiting = [] if detail.question is None else waiting_tasks(await stored_run(store, run.run_id))
    if as_json:
        print_json(detail)
        return
    attempts = detail.history
    _print_task(detail)
    if attempts and attempts[-1].backend.startswith(REUSED):
        print_field("reused", f"from {attempts[-1].backend.removeprefix(REUSED)}, at no cost")
    elif attempts and attempts[-1].backend.startswith(KEPT):
        print_field("kept", f"the answer of a person in {attempts[-1].backend.removeprefix(KEPT)}")
    print_section("prompt", detail.prompt)
    failed = {one.attempt: one.status for one in attempts if one.error_kind}
    for message in detail.messages:
        is_last_prompt = message.role == "user" and message.attempt == attempts[-1].attempt
        whose = "" if is_last_prompt else _message_note(message, failed)
        print_section(f"{message.role}{whose}", "(damaged)" if message.damaged else message.content)
    for answered in detail.answers:
        print_section(f"answered by {answered.by}", f"{answered.question}\n{answered.text}")
    if detail.question is not None:
        print_section("question", detail.question)
        questions = [one for one in waiting if one.task_id == task_id]
        for what, line in (fact for one in questions for fact in question_facts(one, path)):
            print_line(f"{what:<9} {line}")
        if not questions:
            print_line("the answer is stored; the run has not yet received it")
    _print_task_result(detail)
    _print_attempts(attempts)
    for one in attempts:
        if one.traceback is not None:
            print_section(f"traceback (attempt {one.attempt})", one.traceback.rstrip(), is_code=True)


def _message_note(message: MessageRecord, failed: Mapping[int, str]) -> str:
    """Return the note beside the role of a message: sent by a person, or part of an attempt that failed."""
    if message.attempt == 0 and message.role == "user":
        return " (a person, after the run)"
    status = failed.get(message.attempt)
    return f" (attempt {message.attempt}, {status})" if status else ""


def _print_task(task: TaskDetail) -> None:
    print_field("task", task.task_id)
    print_field("run", task.run_id)
    item = task.spec.get("item")
    print_field("item", item if isinstance(item, str) or item is None else json.dumps(item, ensure_ascii=False))
    print_line(f"{'status':<9} {coloured(task.status, task.status)}")
    print_field("waits", None if task.waits is None else task.waits.text)
    print_field("backend", task.backend)
    print_field("model", task.model)
    print_field("after", ", ".join(task.depends_on))
    before = task.spec.get("continues")
    print_field("continues", None if before is None else f"the conversation of {before}")
    spec = task.spec
    print_field("when", spec.get("when"))
    print_field("settings", ", ".join(f"{name} {spec[name]}" for name in _SETTINGS if name in spec))
    print_field("system", spec.get("system"))
    print_field("cwd", spec.get("cwd"))
    print_field("shared", "yes" if spec.get("shared") else None)
    print_field("env", ", ".join(f"{name}={text}" for name, text in spec.get("env", {}).items()))
    print_field("files", ", ".join(path for path, _digest in spec.get("files", ())))
    print_field("added by", task.added_by)
    print_field("session", task.session_id)
    print_field("time", seconds(task.duration_s))
    later = [one for one in task.messages if one.attempt == 0]
    _print_usage(
        task.usage, tokens(Usage(sum(one.input_tokens for one in later), sum(one.output_tokens for one in later)))
    )
    print_field("error", failure(task.error_kind, task.error))


def _print_task_result(task: TaskDetail) -> None:
    if task.damaged:
        print_section("result", "(damaged: the checksum does not match)")
    elif task.text is not None and not any(
        one.role == "assistant" and one.content == task.text for one in task.messages
    ):
        print_section("result", task.text)
    if task.data is not None:
        print_section("data", json.dumps(task.data, ensure_ascii=False, indent=2), is_code=True)


def _print_attempts(attempts: Sequence[AttemptView]) -> None:
    if not attempts:
        return
    print_line("\n-- attempts --")
    rows: list[tuple[str, ...]] = []
    for one in attempts:
        error = as_line(failure(one.error_kind, one.error), _LONGEST_ERROR)
        note = "; ".join(filter(None, (token_parts(one.usage), error)))
        times = one.started_at, seconds(one.duration_s)
        rows.append((str(one.attempt), one.status, as_line(_who(one)), *times, *spent_cells(one.usage), note))
    print_table(rows, 1, [one.status for one in attempts], frozenset({0, 4, 5, 6}))


def _who(one: AttemptView) -> str:
    """Return the backend of the attempt, with its model, its host, and the backend that it moved from."""
    model, place = (f" ({one.model})" if one.model else ""), (f" on {one.place}" if one.place else "")
    return f"{one.backend}{model}{place}" + (f", moved from {one.moved_from}" if one.moved_from else "")


@subcommand("log", LOG)
async def log_command(
    run: str, task: str | None, follow: bool, lines: int | None, store_path: StorePlace, as_json: bool
) -> int:
    """Print the history of RUN (an id, the beginning of an id, or `last`), or of TASK in the run: each event with its
    time and cost, and between the events the output of agents and the messages of conversations.

    With --follow, print events as they happen until the run has ended; the exit code is that of the run. An agent whose
    plait was killed is followed as well. If no process works on the run, the exit code is 6. With --json, each
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
            return _behind_mark("| ", detail["text"])
        mark = {"tool": "> ", "waiting": "waits: "}.get(detail["output"], "notice: ")
        return [mark + as_line(short(detail["text"]))]
    if entry.kind == "message":
        role = as_line(detail["role"])
        if detail.get("damaged"):
            return [f"damaged: a message ({role}) does not fit its checksum"]
        return _behind_mark(f"{role}| ", detail["content"])
    facts = {"run_id": run_id, "at": entry.at, "attempt": entry.attempt, **detail}
    line = as_line(sentence(entry.kind, facts))
    status = entry.kind.partition("_")[2]
    word = status.replace("_", " ")
    if line.startswith(word):
        line = coloured(word, status) + line.removeprefix(word)
    elif line.endswith(f" {word}"):
        line = line.removesuffix(word) + coloured(word, status)
    return [line] if line else []


def _behind_mark(mark: str, text: str) -> list[str]:
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
        lines, self._tail = self._tail or (), None
        for line in lines:
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
    if words := words_to_continue(status, run.run_id):
        print_note(f"run {run.run_id} is {status.value.replace('_', ' ')}, and no process works on it")
        print_next(path, *words)
    return STATUS_CODES.get(status, CANCELLED)


def _reader_is_gone() -> bool:
    """Return whether the reader of standard output has closed its end."""
    try:
        poll = select.poll()
        poll.register(output().fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


_CONTEXT = 8
"""The words of unchanged text that are shown on each side of a change."""
_MARKS = {"removed": ("[-", "-]"), "added": ("{+", "+}")}


@subcommand("diff", DIFF)
async def diff_command(a: str, b: str, store_path: StorePlace, as_json: bool) -> None:
    """Compare RUN with OTHER, task by task: prompt, result, status, tokens, cost and time, and the first task where the
    runs diverged.

    Words only in RUN are shown as [-these-], words only in OTHER as {+these+}. Parts of a `for_each` are compared by
    their element, not by their number.
    """
    async with open_store(store_path, "read") as store:
        before, after = await find_run(store, a), await find_run(store, b)
        comparison = await compare_runs(store, before.run_id, after.run_id)
    if as_json:
        print_json(comparison)
        return
    for name, run in (("run", comparison.a), ("other", comparison.b)):
        ends = run.started_at, run.ended_at
        took = None if None in ends else parse_time(run.ended_at or "") - parse_time(run.started_at or "")
        print_field(name, f"{run.run_id}, {', '.join(_facts(run.status, run.usage, took))}")
    for task in comparison.tasks[:1]:
        print_field("diverged", f"at {_head(task)}")
    for task in comparison.tasks:
        _print_difference(task)
    changed = counted(len(comparison.tasks), "task")
    print_line(f"{chr(10) if comparison.tasks else ''}{changed} changed, {comparison.same:,} the same")


def _head(task: TaskDifference) -> str:
    why = task.why or f"another {' and '.join(task.changed)}"
    cut_off = "; same answer: cut off here" if task.changed == ("prompt",) else ""
    return f"{as_line(task.task_id)}: {as_line(why)}{cut_off}"


def _print_difference(task: TaskDifference) -> None:
    before, after, lines = task.a, task.b, list[str]()
    if before is None or after is None:
        side = before or after
        assert side is not None
        lines += [f"{'prompt':<9} {visible(side.prompt)}", f"{'result':<9} {visible(side.text or '')}"]
        lines.append(f"{'status':<9} {_facts_of(side)}")
    else:
        if "prompt" in task.changed:
            lines.append(f"{'prompt':<9} {_marked(task.words['prompt'])}")
        if "result" in task.changed:
            lines.append(f"{'result':<9} {_marked(task.words['result'])}")
        was, now = _facts_of(before), _facts_of(after)
        lines.append(f"{'status':<9} {was}{'' if was == now else f' -> {now}'}")
    print_section(_head(task), "\n".join(lines))


def _facts_of(task: TaskView) -> str:
    error = as_line(failure(task.error_kind, task.error), 120)
    return ", ".join([*_facts(task.status, task.usage, task.duration_s), *filter(None, [error])])


def _facts(status: str, usage: Usage, duration: float | None) -> Iterator[str]:
    yield from filter(None, [status, tokens(usage, " tokens"), cost(usage), seconds(duration)])


def _marked(pieces: Sequence[Piece]) -> str:
    """Return the differing words of two texts with marks, and the words around them."""
    if all(piece["change"] == "kept" for piece in pieces):
        return "only white space differs"
    shown = [_shown(piece, number == 0, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return visible("".join(shown)).strip("\n")


def _shown(piece: Piece, is_first: bool, is_last: bool) -> str:
    text = piece["text"]
    if piece["change"] != "kept":
        start, end = _MARKS[piece["change"]]
        inner = text.strip()
        lead = text[: len(text) - len(text.lstrip())]
        return f"{lead}{start}{inner}{end}"
    words = text.split()
    if len(words) <= 2 * _CONTEXT:
        return text
    left = "" if is_first else " " + " ".join(words[:_CONTEXT])
    right = "" if is_last else " ".join(words[-_CONTEXT:])
    return f"{left} … {right}" if left and right else (f"{left} …" if left else f"… {right}")


_PLAN_SUFFIXES = frozenset({".yaml", ".yml", ".json", ".toml"})


@subcommand("graph", GRAPH)
def graph_command(what: str, output: Path | None, inputs: dict[str, str], store_path: StorePlace, as_json: bool) -> int:
    """Print the graph of a plan file or of a run as Mermaid, or write a picture, coloured by status.

    Beyond 200 tasks the parts of a `for_each` are one box with their counts by status.
    """
    path, looks = Path(what), dict[str, Look]()
    is_plan = path.is_file() or path.suffix.lower() in _PLAN_SUFFIXES or os.sep in what
    if is_plan:
        plan = read_plan(path, inputs)
        # The run of a workflow begins with its first step alone.
        dag = plan.policy.outline(plan.dag.inputs) if isinstance(plan.policy, Workflow) else plan.dag
        title, caption = plan.name, "plan"
    elif inputs:
        raise click.UsageError("--set is for plans; a run has its inputs")
    else:
        run, tasks = anyio.run(_load_run, store_path, what)
        looks = {task.task_id: _node_style(task) for task in tasks}
        dag, title = decode_dag(run, tasks), run.name or "plait"
        caption = f"run {run.run_id}, {shown_status(run).value}"
    folded = fold(dag, looks)
    if as_json:
        print_json({"name": title, "tasks": _tasks_json(dag, looks), "mermaid": mermaid(*folded)})
    if output is not None:
        make = page if output.suffix.lower() == ".html" else svg
        picture = make(*folded, title=visible(title), caption=visible(caption))
        write_file(output, picture, private=not is_plan)  # a picture of a run shows data of the store
    elif not as_json:
        print_line(mermaid(*folded).removesuffix("\n"))
    return COMPLETED


async def _load_run(path: StorePlace, word: str) -> tuple[RunRecord, tuple[TaskRecord, ...]]:
    """Return the run with its tasks."""
    async with open_store(path, "read") as store:
        run = await find_run(store, word)
        return run, await listed_tasks(store, run)


def _node_style(task: TaskRecord) -> Look:
    status, by = TaskStatus(task.status), task.added_by
    used = tokens(task.usage, " tokens")
    added = f"added by {by}" if by else ""
    note = " · ".join(filter(None, (status.value.replace("_", " "), seconds(task.duration_s), used, added)))
    attempts = f", {counted(task.attempt, 'attempt')}" if task.attempt else ""
    error = as_line(failure(task.error_kind, task.error), 300)
    title = f"{task.task_id}: {status.value}{attempts}{added and ', '}{added}"
    return Look(status, note, "\n".join(filter(None, (title, error))), by)


def _tasks_json(dag: DAG, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    return [
        {
            "task_id": task.id,
            "depends_on": task.upstream,
            "status": look.status and look.status.value,
            "added_by": look.added_by,
        }
        for task in dag
        for look in [looks.get(task.id, Look())]
    ]
