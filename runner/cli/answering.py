"""`plait answer`, once its options are read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from runner.cli import report
from runner.cli.backing import Backing
from runner.cli.exits import COMPLETED, say
from runner.cli.lookup import find_run, find_task, say_if_watched, store_for_going_on
from runner.cli.options import plait


async def answer_task(
    which: tuple[str, str], how: tuple[Literal["done", "again", "fail"], str], path: Path, as_json: bool
) -> int:
    """Settle the task `which` (run, task) as `how` says; the exit code."""
    async with store_for_going_on(path) as store:
        record = await find_run(store, which[0])
        task = await find_task(store, record, which[1])
        say_if_watched(record)
        await Backing({}).runner({}, store=store).answer(record.run_id, task.task_id, *how)
    if as_json:
        report.tell_value({"run_id": record.run_id, "task": task.task_id, "answer": how[0]})
    else:
        say(f"task {task.task_id} of run {record.run_id} is answered: {how[0]}")
        say(f"  {'resume':<9} {plait(path, 'resume', record.run_id)}")
    return COMPLETED
