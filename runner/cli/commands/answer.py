"""`plait answer`: answer the question of a task, or settle a task that waits for a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio
import click

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import BackendSet
from plait.runner.cli.display import report
from plait.runner.cli.exits import COMPLETED, print_note
from plait.runner.cli.lookup import existing_store, find_run, find_task, print_watch_notice
from plait.runner.cli.options import (
    StorePlace,
    command_line,
    is_utf8,
    json_option,
    store_option,
)
from plait.runner.cli.stored_backends import inspecting_runner
from plait.runner.domain.question import asking_of
from plait.statuses import RUN_DONE, RunStatus


@click.command("answer")
@click.argument("run")
@click.argument("task")
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
def answer_command(
    run: str,
    task: str,
    value: str | None,
    done: str | None,
    again: bool,
    fail: str | None,
    store_path: StorePlace,
    as_json: bool,
) -> int:
    """Answer the question of TASK in RUN (an id, the beginning of an id, or `last`) with VALUE: text, or JSON if the
    question has a schema. `plait questions` shows the questions. The first answer counts, also while another process
    runs the run.

    A task marked at_most_once waits if the process died while the task was running: give --done, --again or --fail.
    --done and --fail also end a task that asks a question. `plait resume` continues the run.
    """
    said: dict[AnswerKind, str | None] = {"value": value, "done": done, "again": "" if again else None, "fail": fail}
    given = [AnswerChoice(kind, text) for kind, text in said.items() if text is not None]
    if len(given) != 1:
        raise click.UsageError("give one of VALUE, --done TEXT, --again and --fail REASON")
    if not is_utf8(given[0].text):
        raise click.BadParameter("the answer is not text in UTF-8")
    return anyio.run(answer_task, (run, task), given[0], store_path, as_json)


AnswerKind: TypeAlias = Literal["value", "done", "again", "fail"]


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """The answer of a person: a `value` for the question, or how the task is settled."""

    kind: AnswerKind
    text: str


async def answer_task(which: tuple[str, str], choice: AnswerChoice, path: StorePlace, as_json: bool) -> int:
    """Answer or settle the task `which` (run, task). Return the exit code."""
    async with existing_store(path) as store:
        record = await find_run(store, which[0])
        task = await find_task(store, record, which[1])
        taken = True
        if choice.kind == "value":
            taken = await _submit_answer(store, record, task, choice.text)
        else:
            print_watch_notice(record)
            async with inspecting_runner(store, record, await store.list_tasks(record.run_id)) as runner:
                await runner.answer(record.run_id, task.task_id, choice.kind, choice.text)
        record = await find_run(store, record.run_id)
    if as_json:
        report.print_json({"run_id": record.run_id, "task_id": task.task_id, "answer": choice.kind, "taken": taken})
        return COMPLETED
    said = choice.text if choice.kind == "value" else choice.kind
    print_note(f"task {task.task_id} of run {record.run_id} is answered: {said}{_describe_result(record, taken)}")
    if record.owner is None and RunStatus(record.status) not in RUN_DONE:
        print_note(f"  {'resume':<9} {command_line(path, 'resume', record.run_id)}")
    else:
        print_note(f"  {'show':<9} {command_line(path, 'show', record.run_id, task.task_id)}")
    return COMPLETED


async def _submit_answer(store: Store, record: RunRecord, task: TaskRecord, text: str) -> bool:
    # Without a question the runner decides: it reads the task once more.
    asking = None if task.asked is None else asking_of(task.question or "", task.asked)
    value = text if asking is None else asking.read(text)
    runner = BackendSet({}).make_runner({}, store=store)
    return await runner.answer_question(record.run_id, task.task_id, value, attempt=task.attempt or None)


def _describe_result(record: RunRecord, taken: bool) -> str:
    if record.owner is None:
        return ""
    owner = f"process {record.owner.pid} on {record.owner.host}"
    if taken:
        return f"\n{owner} continues the task"
    return f"\n{owner} has not yet received the answer; if the process dies, the next `plait resume` uses it"
