"""What `plait runs` and `plait show` print."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from persistence.protocol import Store
from persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord
from runner.cli.colour import coloured
from runner.cli.exits import COMPLETED, tell
from runner.cli.lookup import find_run, find_task, shown_status, store_for_reading
from runner.cli.options import plait
from runner.cli.report import tell_value
from runner.cli.sections import tell_answers, tell_question, tell_section
from runner.cli.text import age, columns, dollars, one_line, seconds, size, tokens, visible
from runner.cli.waiting import waiting_in
from runner.clock import iso
from runner.owner import Liveness, liveness
from runner.retrying import next_tries
from runner.status import RUN_DONE, TASK_DONE, RunStatus, TaskStatus

_LONGEST_ERROR = 120
_EVENTS_AT_ONCE = 5000


async def list_runs(path: Path, limit: int, as_json: bool) -> int:
    """The runs in the store, newest first."""
    async with store_for_reading(path) as store:
        runs = await store.list_runs(limit)
    if as_json:
        tell_value([_run_value(run) for run in runs])
        return COMPLETED
    if not runs:
        return _tell_no_runs()
    rows = [("RUN", "NAME", "STATUS", "TASKS", "TOKENS", "AGE"), *map(_run_row, runs)]
    _tell_table(rows, 2, [None, *(shown_status(run) for run in runs)], frozenset({3, 4, 5}))
    return COMPLETED


async def list_runs_at_length(path: Path, limit: int, as_json: bool) -> int:
    """The same with what they cost, the bytes that they take in the store, and the process that runs or ran them."""
    async with store_for_reading(path) as store:
        runs = await store.list_runs(limit)
        sizes = await store.run_sizes()
    if as_json:
        tell_value([{**_run_value(run), **_long_value(run, sizes.get(run.run_id, 0))} for run in runs])
        return COMPLETED
    if not runs:
        return _tell_no_runs()
    head = ("RUN", "NAME", "STATUS", "TASKS", "TOKENS", "COST", "SIZE", "AGE", "OWNER")
    rows = [head, *(_long_row(run, sizes.get(run.run_id, 0)) for run in runs)]
    _tell_table(rows, 2, [None, *(shown_status(run) for run in runs)], frozenset({3, 4, 5, 6, 7}))
    return COMPLETED


def _long_row(run: RunRecord, held: int) -> tuple[str, ...]:
    *row, created = _run_row(run)
    return (*row, dollars(run.cost_usd), size(held), created, _owner(run))


def _long_value(run: RunRecord, held: int) -> dict[str, Any]:
    owner = None if run.owner is None else {**asdict(run.owner), "liveness": liveness(run.owner).value}
    return {"size_bytes": held, "owner": owner}


def _owner(run: RunRecord) -> str:
    if run.owner is None:
        return ""
    gone = ", gone" if liveness(run.owner) is Liveness.DEAD else ""
    return one_line(f"process {run.owner.pid} on {run.owner.host}{gone}")


def _tell_no_runs() -> int:
    tell("no runs yet; `plait run PLAN` makes one")
    return COMPLETED


def _run_row(run: RunRecord) -> tuple[str, ...]:
    done, total = _done_of(run)
    created = datetime.fromisoformat(run.created_at).timestamp()
    return (
        one_line(run.run_id),
        one_line(run.name, 40),
        shown_status(run).value,
        f"{done:,}/{total:,}",
        tokens(run.input_tokens, run.output_tokens),
        age(time.time() - created),
    )


def _done_of(run: RunRecord) -> tuple[int, int]:
    return sum(run.counts.get(status, 0) for status in TASK_DONE), sum(run.counts.values())


def _run_value(run: RunRecord) -> dict[str, Any]:
    done, total = _done_of(run)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": shown_status(run).value,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "error": run.error,
        "done": done,
        "total": total,
        "counts": run.counts,
        "input_tokens": run.input_tokens,
        "output_tokens": run.output_tokens,
        "cost_usd": run.cost_usd,
    }


async def show_run(path: Path, word: str, as_json: bool) -> int:
    """A run and its tasks."""
    async with store_for_reading(path) as store:
        run = await find_run(store, word)
        tasks = await store.list_tasks(run.run_id)
        waiting = () if RunStatus(run.status) in RUN_DONE else tasks
        tries = {name: iso(when) for name, when in (await next_tries(store, run.run_id, waiting)).items()}
    if as_json:
        values = [{**_task_value(task), "next_try_at": tries.get(task.task_id)} for task in tasks]
        tell_value({**_run_value(run), "settings": json.loads(run.settings), "tasks": values})
        return COMPLETED
    _tell_run(run)
    rows = [("TASK", "STATUS", "TRIES", "TIME", "TOKENS", ""), *(_task_row(run, task, tries) for task in tasks)]
    _tell_table(rows, 1, [None, *(TaskStatus(task.status) for task in tasks)], frozenset({2, 3, 4}))
    next_commands: list[str] = []
    if any(TaskStatus(task.status) is TaskStatus.WAITING_INPUT for task in tasks):
        next_commands.append("questions")
    if shown_status(run) in {RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT}:
        next_commands.append("resume")
    if next_commands:
        tell("")
    for name in next_commands:
        tell(f"{name:<9} {plait(path, name, run.run_id)}")
    return COMPLETED


def _tell_run(run: RunRecord) -> None:
    status = shown_status(run)
    done, total = _done_of(run)
    plan = json.loads(run.settings).get("plan")
    owner = run.owner
    tell(f"{'run':<9} {visible(run.run_id)}")
    tell(f"{'name':<9} {one_line(run.name)}")
    tell(f"{'status':<9} {coloured(status.value, status, sys.stdout)}, {done:,} of {total:,} tasks done")
    _tell_if("error", run.error)
    _tell_if("plan", plan if isinstance(plan, str) else None)
    _tell_if("created", run.created_at)
    _tell_if("ended", run.ended_at)
    _tell_if("owner", f"process {owner.pid} on {owner.host}" if owner and status is RunStatus.RUNNING else None)
    used = " ".join(filter(None, (tokens(run.input_tokens, run.output_tokens), dollars(run.cost_usd))))
    _tell_if("tokens", used)
    tell("")


def _tell_if(name: str, value: str | None) -> None:
    if value:
        tell(f"{name:<9} {one_line(value)}")


def _task_row(run: RunRecord, task: TaskRecord, tries: Mapping[str, str]) -> tuple[str, ...]:
    blocked = run.status == RunStatus.FAILED and task.status == TaskStatus.PENDING
    error = f"{task.error_kind}: {task.error}" if task.error_kind else "blocked by a failed task" if blocked else ""
    error = error if task.question is None else f"asks: {task.question}"
    next_try = f"; next try at {tries[task.task_id]}" if task.task_id in tries else ""
    return (
        one_line(task.task_id),
        task.status,
        str(task.attempt or ""),
        seconds(task.duration_s),
        tokens(task.input_tokens, task.output_tokens),
        "the stored result is damaged" if task.damaged else one_line(error, _LONGEST_ERROR) + next_try,
    )


def _task_value(task: TaskRecord) -> dict[str, Any]:
    return {
        **asdict(task),
        "data": None if task.data is None else json.loads(task.data),
        "asked": None if task.asked is None else json.loads(task.asked),
        "answers": None if task.answers is None else json.loads(task.answers),
        "spec": json.loads(task.spec),
    }


async def show_task(path: Path, word: str, task_id: str, as_json: bool) -> int:
    """A task: its prompt, its conversation, its result and its attempts."""
    async with store_for_reading(path) as store:
        run = await find_run(store, word)
        task = await find_task(store, run, task_id)
        attempts = await store.list_attempts(run.run_id, task.task_id)
        messages = await store.list_messages(run.run_id, task.task_id)
        waiting = [] if task.question is None else await waiting_in(store, run.run_id)
    if as_json:
        extra = {"messages": [asdict(one) for one in messages], "attempts": [asdict(one) for one in attempts]}
        tell_value({"run_id": run.run_id, **_task_value(task), **extra})
        return COMPLETED
    _tell_task(run, task)
    tell_section("prompt", task.prompt)
    for message in messages:
        by = " (a person, after the run)" if message.attempt == 0 and message.role == "user" else ""
        tell_section(f"{message.role}{by}", "(damaged)" if message.damaged else message.content)
    tell_answers(task)
    tell_question(task, [one for one in waiting if one.task_id == task.task_id], path)
    _tell_result(task, messages)
    _tell_attempts(attempts)
    return COMPLETED


def _tell_task(run: RunRecord, task: TaskRecord) -> None:
    tell(f"{'task':<9} {visible(task.task_id)}")
    tell(f"{'run':<9} {visible(run.run_id)}")
    tell(f"{'status':<9} {coloured(task.status, task.status, sys.stdout)}")
    _tell_if("backend", task.backend)
    _tell_if("after", ", ".join(task.depends_on))
    _tell_if("added by", task.added_by)
    _tell_if("session", task.session_id)
    _tell_if("time", seconds(task.duration_s))
    _tell_if("tokens", tokens(task.input_tokens, task.output_tokens))
    _tell_if("error", f"{task.error_kind}: {task.error}" if task.error_kind else None)


def _tell_result(task: TaskRecord, messages: Sequence[MessageRecord]) -> None:
    if task.damaged:
        tell_section("result", "(damaged: it does not fit its checksum)")
    elif task.text is not None and not any(one.role == "assistant" and one.content == task.text for one in messages):
        tell_section("result", task.text)
    if task.data is not None:
        tell_section("data", json.dumps(json.loads(task.data), ensure_ascii=False, indent=2))


def _tell_attempts(attempts: Sequence[AttemptRecord]) -> None:
    if not attempts:
        return
    tell("\n-- attempts --")
    rows = [
        (
            str(one.attempt),
            one.status,
            one_line(one.backend),
            one.started_at,
            seconds(one.duration_s),
            tokens(one.input_tokens, one.output_tokens),
            one_line(f"{one.error_kind}: {one.error}" if one.error_kind else one.error or "", _LONGEST_ERROR),
        )
        for one in attempts
    ]
    _tell_table(rows, 1, [one.status for one in attempts], frozenset({0, 4, 5}))


async def show_events(path: Path, word: str, as_json: bool) -> int:
    """A run's history, oldest first."""
    async with store_for_reading(path) as store:
        run = await find_run(store, word)
        events = await _all_events(store, run.run_id)
    if as_json:
        tell_value([{**asdict(one), "detail": json.loads(one.detail)} for one in events])
        return COMPLETED
    rows = [(one.at, one.kind, one_line(one.task_id or ""), one_line(_detail(one), _LONGEST_ERROR)) for one in events]
    _tell_table(rows, 1, [None] * len(rows))
    return COMPLETED


def _detail(event: EventRecord) -> str:
    detail = json.loads(event.detail)
    return " ".join(f"{name}={value}" for name, value in detail.items() if value is not None)


async def _all_events(store: Store, run_id: str) -> list[EventRecord]:
    events: list[EventRecord] = []
    while more := await store.list_events(run_id, events[-1].seq if events else 0, _EVENTS_AT_ONCE):
        events += more
    return events


def _tell_table(
    rows: Sequence[Sequence[str]],
    status_column: int,
    statuses: Sequence[str | None],
    right: frozenset[int] = frozenset(),
) -> None:
    for row, status in zip(columns(rows, right), statuses, strict=True):
        if status is not None:
            row[status_column] = coloured(row[status_column], status, sys.stdout)
        tell("  ".join(row).rstrip())
