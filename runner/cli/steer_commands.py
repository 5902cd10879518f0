"""`plait answer`, `plait continue`, `plait pause`, `plait tune`, `plait retry` and `plait cancel`: a person steers a
run, wherever it runs.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import subcommand
from plait.runner.cli.command_options import ANSWER, CANCEL, CONTINUE, PAUSE, RETRY, TUNE
from plait.runner.cli.ctrl_c import end_at_second
from plait.runner.cli.run_report import answering_command, print_watch_notice, question_facts, unreached_line
from plait.runner.cli.terminal_output import (
    as_line,
    output,
    print_json,
    print_line,
    print_next,
    print_note,
    visible,
    without_controls,
)
from plait.runner.client.answer_task import How
from plait.runner.client.run_backends import FileOptions, TrustedBackends
from plait.runner.client.runs import Runs, find_run
from plait.runner.domain.asked_question import asking_of
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import CANCEL_GRACE_SECONDS, StorePlace, open_store
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED, stores_backends
from plait.runner.views.read_views import find_task
from plait.runner.views.view_models import AskedView, QuestionView, ReplyView, view_json
from plait.statuses import RUN_DONE, RunStatus


@subcommand("answer", ANSWER)
async def answer_command(
    run: str | None, task: str | None, value: str | None, store_path: StorePlace, as_json: bool, **settled: Any
) -> None:
    """Answer the question of TASK in RUN (an id, the beginning of an id, or `last`) with VALUE: text, or JSON if the
    question has a schema. The first answer counts, even while another process executes
    the run.

    Without TASK, print the open questions of RUN, or of all runs, with the commands that answer. A question that has
    been answered is no longer printed, also before the run has received the answer.

    A task marked at_most_once waits if the process died while the task was running: give --done, --again or --fail.
    --done and --fail also end a task that asks a question. `plait resume` continues the run.
    """
    settled["again"] = "" if settled["again"] else None
    replies = {name: text for name, text in {"value": value, **settled}.items() if text is not None}
    if run is None or task is None:
        await _print_questions(run, store_path, as_json)
        return
    ((kind, text),) = replies.items()
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        waiting = await find_task(store, record, task)
        runs = TrustedBackends(store, note=print_note).runs()
        taken = True
        if kind == "value":
            # Without a question the runner decides: it reads the task once more.
            asking = None if waiting.asked is None else asking_of(waiting.question or "", waiting.asked)
            reply = text if asking is None else asking.read(text)
            taken = await runs.answer(record.run_id, task, reply, attempt=waiting.attempt or None)
        else:
            print_watch_notice(record)
            await runs.settle(record.run_id, task, cast("How", kind), text)
        record = await find_run(store, record.run_id)
    if as_json:
        print_json({"run_id": record.run_id, "task_id": task, "answer": kind, "taken": taken})
        return
    given_as = text if kind == "value" else kind
    print_note(f"task {task} of run {record.run_id} is answered: {given_as}{_answer_note(record, taken)}")
    if record.owner is None and RunStatus(record.status) not in RUN_DONE and stores_backends(record):
        print_next(store_path, "resume", record.run_id)
    else:
        print_next(store_path, "show", record.run_id, task)


def _answer_note(record: RunRecord, taken: bool) -> str:
    if record.owner is None:
        return ""
    owner = record.owner.process
    if taken:
        return f"\n{owner} continues the task"
    return f"\n{owner} has not yet received the answer; if the process dies, the next `plait resume` uses it"


async def _print_questions(word: str | None, path: StorePlace, as_json: bool) -> None:
    """Print the questions of the run that `word` names, or of every run in the store."""
    async with open_store(path, "read") as store:
        run_id = None if word is None else (await find_run(store, word)).run_id
        for run in await store.list_runs(MOST_RUNS_SEARCHED) if word is None else ():
            if run.damaged:
                print_note(as_line(run.error or ""))
        runs = TrustedBackends(store, note=print_note).runs()
        waiting = await runs.questions(run_id, interrupted=True)
    if as_json:
        print_json([_as_json(one, path) for one in waiting])
        return
    for (of, name), questions in groupby(waiting, lambda one: (one.run_id, one.run_name)):
        print_line(f"run {visible(of)}  {as_line(name)}".rstrip())
        for one in questions:
            text = visible(one.question).replace("\n", "\n    ")
            print_line(f"\n  {as_line(one.task_id)}: {text}")
            for what, line in question_facts(one, path):
                print_line(f"    {what:<8}  {line}")
        print_line("")
    if not waiting:
        print_line("nothing waits for a person" + ("" if run_id is None else f" in run {visible(run_id)}"))


def _as_json(one: QuestionView, path: StorePlace) -> dict[str, Any]:
    return {
        "run_id": one.run_id,
        "task_id": one.task_id,
        "attempt": one.attempt,
        "kind": "at_most_once" if one.asks is None else "question",
        "question": one.question,
        **view_json(one.asks or AskedView()),
        "command": answering_command(one, path),
    }


@subcommand("continue", CONTINUE)
async def continue_command(run: str, task: str, message: str, **options: Any) -> None:
    """Send MESSAGE in the conversation of TASK in RUN (an id, the beginning of an id, or `last`) and print the answer.

    The turn is stored; the result of the task does not change.
    """
    end_at_second([signal.SIGINT])  # the first cancels this function
    async with open_store(options["store_path"], "existing") as store:
        record = await find_run(store, run)
        await find_task(store, record, task)
        print_watch_notice(record)
        files = FileOptions(options["plan"], options["backends"], options["hosts"])
        runs = TrustedBackends(store, files, note=print_note).runs()
        reply = await runs.continue_task(record.run_id, task, message)
    if options["as_json"]:
        print_json(ReplyView.of(record.run_id, task, reply))
        return
    fit = visible if output().isatty() else without_controls
    print_line(fit(reply.text).removesuffix("\n"))


@asynccontextmanager
async def _steered_run(path: StorePlace, word: str) -> AsyncGenerator[tuple[RunRecord, Runs]]:
    """Yield the run that `word` names, and the runs of its store."""
    async with open_store(path, "existing") as store:
        yield await find_run(store, word), TrustedBackends(store, note=print_note).runs()


@subcommand("pause", PAUSE)
async def pause_command(run: str, backend: str | None, off: bool, store_path: StorePlace, as_json: bool) -> None:
    """Pause RUN (an id, the beginning of an id, or `last`), even while another process executes it.

    No further task starts, and calls under way end normally. The process of the run stays, and reads this within a
    second. The run is still paused after a crash and after `plait resume`, until `plait pause RUN --off`.

    `plait tune` changes how many tasks run at once.
    """
    async with _steered_run(store_path, run) as (record, runs):
        is_live = await runs.pause(record.run_id, backend=backend, off=off)
    what = f"{'' if backend is None else f'{backend} of '}run {record.run_id}"
    _print_change(record, f"{what} {'is no longer paused' if off else 'is paused'}", is_live=is_live, as_json=as_json)
    if not as_json and not off:
        print_next(store_path, "pause", record.run_id, *(() if backend is None else ("--backend", backend)), "--off")


@subcommand("tune", TUNE)
async def tune_command(
    run: str, concurrency: int | None, limits: Mapping[str, int], store_path: StorePlace, as_json: bool
) -> None:
    """Change how many tasks of RUN (an id, the beginning of an id, or `last`) run at once, while it runs.

    Calls under way end normally. The process of the run reads the numbers within a second, and a later `plait resume`
    keeps them. A run of `plait serve` gets no more slots than the server has.
    """
    async with _steered_run(store_path, run) as (record, runs):
        is_live = await runs.tune(record.run_id, concurrency=concurrency, limits=limits)
    numbers = [*([] if concurrency is None else [f"{concurrency} tasks at once"])]
    numbers += [f"{number} on {name}" for name, number in limits.items()]
    _print_change(record, f"run {record.run_id} has at most {', '.join(numbers)}", is_live=is_live, as_json=as_json)


@subcommand("retry", RETRY)
async def retry_command(run: str, task: str, store_path: StorePlace, as_json: bool) -> None:
    """Run the failed TASK of RUN (an id, the beginning of an id, or `last`) again while the run goes on; at once, if it
    waits for its next attempt.

    The process of the run reads this within a second, and tasks that wait for TASK continue after it. Of a run that has
    ended, `plait resume RUN --retry-failed` runs the failed tasks again.
    """
    async with _steered_run(store_path, run) as (record, runs):
        await runs.retry(record.run_id, task)
    _print_change(record, f"task {task} of run {record.run_id} is to run again", is_live=True, as_json=as_json)


def _print_change(record: RunRecord, change: str, *, is_live: bool, as_json: bool) -> None:
    if as_json:
        print_json({"run_id": record.run_id, "is_live": is_live})
        return
    owner = record.owner.process if record.owner else "its process"
    print_note(change + (f": {owner} reads it within a second" if is_live else "; no process works on it now"))


_CANCEL_WAIT = CANCEL_GRACE_SECONDS + 3.0
"""Seconds to wait for the end of the run: the grace time of running tasks, and the time until the owner reads the note.
"""


@subcommand("cancel", CANCEL)
async def cancel_command(run: str, store_path: StorePlace, as_json: bool, hosts: Path | None) -> None:
    """Cancel RUN (an id, the beginning of an id, or `last`) for good, even while another process executes it.

    Completed tasks keep their results. No further task starts, and running tasks have 5 seconds to end, or as many as
    `serve --cancel-grace` says for a run of a server. A run that has ended stays as it is.

    Hosts of the run that cannot be reached are named. Cancel the run again when they are back, to end what still runs
    there.
    """
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        had_ended = RunStatus(record.status) in RUN_DONE
        unreached: dict[str, Sequence[str]] = {}
        if not had_ended:
            print_watch_notice(record)
        runs = TrustedBackends(store, FileOptions(hosts=hosts), note=print_note).runs()
        status = await runs.cancel(record.run_id, wait=_CANCEL_WAIT, on_unreached=unreached.update)
        record = await find_run(store, record.run_id)
    if as_json:
        value = {"run_id": record.run_id, "status": status.value, "had_ended": had_ended, "unreached": unreached}
        print_json(value)
        return
    print_note(f"run {record.run_id} {_cancel_note(record, status, had_ended)}")
    for host, tasks in unreached.items():
        print_note(unreached_line(host, tasks))
    if unreached:
        print_next(store_path, "cancel", record.run_id, *(() if hosts is None else ("--hosts", str(hosts))))
    print_next(store_path, "show", record.run_id)


def _cancel_note(record: RunRecord, status: RunStatus, had_ended: bool) -> str:
    if status is RunStatus.CANCELLED:
        return f"is cancelled{' already' if had_ended else ''}"
    if status in RUN_DONE:
        return f"is {status.value} already; nothing was changed"
    owner = record.owner.process if record.owner else "its process"
    if shown_status(record) is RunStatus.CANCELLING:
        return f"is being cancelled: {owner} starts no further task, and is still ending running tasks"
    return f"is to be cancelled: {owner} has not yet answered; if the process dies, cancel or resume finishes the run"
