"""`plait answer`, once its options are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord, TaskRecord
from plait.runner.cli.backends import Backing
from plait.runner.cli.display import report
from plait.runner.cli.exits import COMPLETED, say
from plait.runner.cli.knowing import knowing_runner
from plait.runner.cli.lookup import find_run, find_task, say_if_watched, store_for_going_on
from plait.runner.cli.options import plait
from plait.runner.domain.question import asking_of
from plait.runner.domain.status import RUN_DONE, RunStatus

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
