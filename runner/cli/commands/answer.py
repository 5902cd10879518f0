"""`plait answer`: a person answers a task's question, or settles a task that waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import click

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import Backing
from plait.runner.cli.display import report
from plait.runner.cli.exits import COMPLETED, say
from plait.runner.cli.lookup import find_run, find_task, say_if_watched, store_for_going_on
from plait.runner.cli.options import is_text, json_option, plait, store_option
from plait.runner.cli.stored_backends import knowing_runner
from plait.runner.domain.question import asking_of
from plait.runner.domain.status import RUN_DONE, RunStatus


@click.command("answer")
@click.argument("run")
@click.argument("task")
@click.argument("value", required=False)
@click.option("--done", metavar="TEXT", help="It is done; TEXT is its result (JSON if it has an output_schema).")
@click.option("--again", is_flag=True, help="It did not take effect; run it again. For at_most_once alone.")
@click.option("--fail", metavar="REASON", help="It failed, and REASON says why.")
@store_option
@json_option
def answer_command(  # noqa: PLR0913, PLR0917 - click hands over each option
    run: str,
    task: str,
    value: str | None,
    done: str | None,
    again: bool,
    fail: str | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Answer what TASK in RUN (an id, its beginning, or `last`) asks with VALUE: text, or JSON where the question wants
    some. `plait questions` shows what is asked. The first answer counts, also while another process runs the run.

    A task marked at_most_once waits when its process ended while it was under way: say --done, --again or --fail. The
    first and the last also end a task that asks. `plait resume` goes on afterwards.
    """
    said: dict[How, str | None] = {"value": value, "done": done, "again": "" if again else None, "fail": fail}
    given = [Word(how, text) for how, text in said.items() if text is not None]
    if len(given) != 1:
        raise click.UsageError("say one of VALUE, --done TEXT, --again and --fail REASON")
    if not is_text(given[0].text):
        raise click.BadParameter("the answer is not text in UTF-8")
    return anyio.run(answer_task, (run, task), given[0], store_path, as_json)


How: TypeAlias = Literal["value", "done", "again", "fail"]


@dataclass(frozen=True, slots=True)
class Word:
    """What a person says: a `value` that answers a question, or how the task is settled."""

    how: How
    text: str


async def answer_task(which: tuple[str, str], word: Word, path: Path, as_json: bool) -> int:
    """Answer or settle the task `which` (run, task); the exit code."""
    async with store_for_going_on(path) as store:
        record = await find_run(store, which[0])
        task = await find_task(store, record, which[1])
        taken = True
        if word.how == "value":
            taken = await _answer(store, record, task, word.text)
        else:
            say_if_watched(record)
            async with knowing_runner(store, record, await store.list_tasks(record.run_id)) as runner:
                await runner.answer(record.run_id, task.task_id, word.how, word.text)
        record = await find_run(store, record.run_id)
    if as_json:
        report.tell_value({"run_id": record.run_id, "task_id": task.task_id, "answer": word.how, "taken": taken})
        return COMPLETED
    said = word.text if word.how == "value" else word.how
    say(f"task {task.task_id} of run {record.run_id} is answered: {said}{_what_became(record, taken)}")
    if record.owner is None and RunStatus(record.status) not in RUN_DONE:
        say(f"  {'resume':<9} {plait(path, 'resume', record.run_id)}")
    else:
        say(f"  {'show':<9} {plait(path, 'show', record.run_id, task.task_id)}")
    return COMPLETED


async def _answer(store: Store, record: RunRecord, task: TaskRecord, text: str) -> bool:
    # A task that asks nothing is told of by the runner, which looks once more.
    asking = None if task.asked is None else asking_of(task.question or "", task.asked)
    value = text if asking is None else asking.read(text)
    runner = Backing({}).runner({}, store=store)
    return await runner.answer_question(record.run_id, task.task_id, value, attempt=task.attempt or None)


def _what_became(record: RunRecord, taken: bool) -> str:
    if record.owner is None:
        return ""
    owner = f"process {record.owner.pid} on {record.owner.host}"
    if taken:
        return f"\n{owner} goes on with it"
    return f"\n{owner} was told, and has not taken it up; should it die, the next `plait resume` has the answer"
