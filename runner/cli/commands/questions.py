"""`plait questions`: list the questions of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import click

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord
from plait.runner.cli.display.report import print_json
from plait.runner.cli.display.text import as_line, visible
from plait.runner.cli.exits import COMPLETED, print_line, print_note
from plait.runner.cli.lookup import (
    MAX_RUNS_SEARCHED,
    WaitingQuestion,
    find_run,
    list_waiting,
    read_only_store,
)
from plait.runner.cli.options import (
    StorePlace,
    json_option,
    store_option,
)
from plait.runner.cli.stored_backends import inspecting_runner
from plait.runner.operations.inspect import asks_as_json, shown_status
from plait.runner.recovery.resume_plan import ResumeAction
from plait.runner.state.codec import decode_task
from plait.runner.state.owner import Liveness, liveness
from plait.statuses import RUN_DONE, RunStatus, TaskStatus


@click.command("questions")
@click.argument("run", required=False)
@store_option
@json_option
def questions_command(run: str | None, store_path: StorePlace, as_json: bool) -> int:
    """Show the questions of the tasks of RUN (an id, the beginning of an id, or `last`), or of all runs, with the
    commands that answer. A question that has been answered is no longer shown, also before the run has received the
    answer.
    """
    return anyio.run(list_questions, run, store_path, as_json)


async def list_questions(word: str | None, path: StorePlace, as_json: bool) -> int:
    """Print the questions of the run that `word` names, or of every run in the store. Return the exit code."""
    async with read_only_store(path) as store:
        runs = [await find_run(store, word)] if word is not None else await _list_waiting_runs(store)
        found = [(run, [*await list_waiting(store, run.run_id), *await _list_interrupted(store, run)]) for run in runs]
    if as_json:
        print_json([_as_json(one, path) for _, waiting in found for one in waiting])
        return COMPLETED
    for run, waiting in found:
        if waiting:
            _print_run(run, waiting, path)
    if not any(waiting for _, waiting in found):
        print_line(
            "nothing waits for a person" + (f" in run {visible(found[0][0].run_id)}" if word is not None else "")
        )
    return COMPLETED


async def _list_waiting_runs(store: Store) -> list[RunRecord]:
    runs = await store.list_runs(MAX_RUNS_SEARCHED)
    for run in runs:
        if run.damaged:
            print_note(as_line(run.error or ""))
    asks = (TaskStatus.WAITING_INPUT, TaskStatus.RUNNING)
    return [run for run in runs if any(map(run.counts.get, asks)) and RunStatus(run.status) not in RUN_DONE]


async def _list_interrupted(store: Store, run: RunRecord) -> list[WaitingQuestion]:
    """Return the tasks that wait for a person since the process of the run died: tasks marked at_most_once, and tasks
    during which a process died often. The next resume stores the status.
    """
    if shown_status(run) is not RunStatus.INTERRUPTED or (run.owner and liveness(run.owner) is not Liveness.DEAD):
        return []
    tasks = await store.list_tasks(run.run_id)
    running = [one for one in tasks if one.status == TaskStatus.RUNNING]
    cut = {one.task_id: one for one in running if one.crashes or decode_task(one).at_most_once}
    whole = await store.get_run(run.run_id) if cut else None
    if whole is None:
        return []
    async with inspecting_runner(store, whole, tasks) as runner:
        steps = (await runner.preview_resume(run.run_id)).tasks
    return [
        WaitingQuestion(run.run_id, name, one.attempt, steps[name].reason, None)
        for name, one in cut.items()
        if steps[name].action is ResumeAction.ASK
    ]


def _print_run(run: RunRecord, waiting: Sequence[WaitingQuestion], path: StorePlace) -> None:
    print_line(f"run {visible(run.run_id)}  {as_line(run.name)}".rstrip())
    for one in waiting:
        text = visible(one.text).replace("\n", "\n    ")
        print_line(f"\n  {as_line(one.task_id)}: {text}")
        for what, line in one.facts():
            print_line(f"    {what:<8}  {line}")
        print_line(f"    {'answer':<8}  {one.answer_command(path)}")
    print_line("")


def _as_json(one: WaitingQuestion, path: StorePlace) -> dict[str, Any]:
    asked = one.question
    return {
        "run_id": one.run_id,
        "task_id": one.task_id,
        "attempt": one.attempt,
        "kind": "at_most_once" if asked is None else "question",
        "question": one.text,
        **asks_as_json(asked),
        "command": one.answer_command(path),
    }
