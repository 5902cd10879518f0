"""`plait answer`: list the questions of tasks, answer one, or settle a task that waits for a person."""

from __future__ import annotations

from itertools import groupby
from typing import Any, cast

import click

from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_options import async_command, complete, json_option, print_next, store_option
from plait.runner.cli.run_report import answering_command, print_watch_notice, question_facts
from plait.runner.cli.terminal_output import as_line, print_json, print_line, print_note, visible
from plait.runner.client.answer_task import How
from plait.runner.client.named_runs import find_run
from plait.runner.client.run_backends import TrustedBackends
from plait.runner.domain.asked_question import asking_of
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.state.stored_run import MOST_RUNS_SEARCHED
from plait.runner.views.read_views import find_task
from plait.runner.views.view_models import AskedView, QuestionView, view_json
from plait.safe_text import is_utf8
from plait.statuses import RUN_DONE, RunStatus


@async_command("answer")
@click.argument("run", required=False, shell_complete=complete)
@click.argument("task", required=False, shell_complete=complete)
@click.argument("value", required=False)
@click.option(
    "--done", metavar="TEXT", help="Complete the task with TEXT as its result (JSON if it has an output_schema)."
)
@click.option(
    "--again",
    is_flag=True,
    help="Run the task again: the cut attempt had no effect. Only for a task marked at_most_once.",
)
@click.option("--fail", metavar="REASON", help="Fail the task for this REASON.")
@store_option
@json_option
async def answer_command(
    run: str | None, task: str | None, value: str | None, store_path: StorePlace, as_json: bool, **settled: Any
) -> None:
    """Answer the question of TASK in RUN (an id, the beginning of an id, or `last`) with VALUE: text, or JSON if the
    question has a schema. The first answer counts, also while another process runs the run.

    Without TASK, print the open questions of RUN, or of all runs, with the commands that answer. A question that has
    been answered is no longer printed, also before the run has received the answer.

    A task marked at_most_once waits if the process died while the task was running: give --done, --again or --fail.
    --done and --fail also end a task that asks a question. `plait resume` continues the run.
    """
    settled["again"] = "" if settled["again"] else None
    given = {name: text for name, text in {"value": value, **settled}.items() if text is not None}
    if run is None or task is None:
        if given:
            raise click.UsageError("name the run and the task that the answer is for")
        await _print_questions(run, store_path, as_json)
        return
    if len(given) != 1:
        raise click.UsageError(
            "give one of VALUE, --done TEXT, --again and --fail REASON; without TASK, the open questions are printed"
        )
    ((kind, text),) = given.items()
    if not is_utf8(text):
        raise click.BadParameter("the answer is not text in UTF-8")
    async with open_store(store_path, "existing") as store:
        record = await find_run(store, run)
        asked = await find_task(store, record, task)
        taken = True
        if kind == "value":
            # Without a question the runner decides: it reads the task once more.
            asking = None if asked.asked is None else asking_of(asked.question or "", asked.asked)
            said = text if asking is None else asking.read(text)
            runs = TrustedBackends(store).runs()
            taken = await runs.answer(record.run_id, task, said, attempt=asked.attempt or None)
        else:
            print_watch_notice(record)
            runs = TrustedBackends(store, note=print_note).runs()
            await runs.settle(record.run_id, task, cast("How", kind), text)
        record = await find_run(store, record.run_id)
    if as_json:
        print_json({"run_id": record.run_id, "task_id": task, "answer": kind, "taken": taken})
        return
    given_as = text if kind == "value" else kind
    print_note(f"task {task} of run {record.run_id} is answered: {given_as}{_describe_result(record, taken)}")
    if record.owner is None and RunStatus(record.status) not in RUN_DONE:
        print_next(store_path, "resume", record.run_id)
    else:
        print_next(store_path, "show", record.run_id, task)


def _describe_result(record: RunRecord, taken: bool) -> str:
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
            _print_question(one, path)
        print_line("")
    if not waiting:
        print_line("nothing waits for a person" + ("" if run_id is None else f" in run {visible(run_id)}"))


def _print_question(one: QuestionView, path: StorePlace) -> None:
    text = visible(one.question).replace("\n", "\n    ")
    print_line(f"\n  {as_line(one.task_id)}: {text}")
    for what, line in question_facts(one, path):
        print_line(f"    {what:<8}  {line}")


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
