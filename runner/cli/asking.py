"""`plait questions`, once its options are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persistence.protocol import Store
from persistence.records import RunRecord
from runner.cli.exits import COMPLETED, tell
from runner.cli.lookup import FAR_BACK, find_run, store_for_reading
from runner.cli.report import tell_value
from runner.cli.text import one_line, visible
from runner.cli.waiting import Waiting, waiting_in
from runner.status import RUN_DONE, RunStatus, TaskStatus


async def list_questions(word: str | None, path: Path, as_json: bool) -> int:
    """Show what the run that `word` names waits for, or every run in the store; the exit code."""
    async with store_for_reading(path) as store:
        runs = [await find_run(store, word)] if word is not None else await _waiting_runs(store)
        found = [(run, await waiting_in(store, run.run_id)) for run in runs]
    if as_json:
        tell_value([_value(one, path) for _, waiting in found for one in waiting])
        return COMPLETED
    for run, waiting in found:
        if waiting:
            _tell_run(run, waiting, path)
    if not any(waiting for _, waiting in found):
        tell("nothing waits for a person" + (f" in run {visible(found[0][0].run_id)}" if word is not None else ""))
    return COMPLETED


async def _waiting_runs(store: Store) -> list[RunRecord]:
    runs = await store.list_runs(FAR_BACK)
    return [run for run in runs if run.counts.get(TaskStatus.WAITING_INPUT) and RunStatus(run.status) not in RUN_DONE]


def _tell_run(run: RunRecord, waiting: Sequence[Waiting], path: Path) -> None:
    tell(f"run {visible(run.run_id)}  {one_line(run.name)}".rstrip())
    for one in waiting:
        text = visible(one.text).replace("\n", "\n    ")
        tell(f"\n  {one_line(one.task_id)}: {text}")
        for what, line in one.terms():
            tell(f"    {what:<8}  {line}")
        tell(f"    {'answer':<8}  {one.command(path)}")
    tell("")


def _value(one: Waiting, path: Path) -> dict[str, Any]:
    asked = one.question
    return {
        "run_id": one.run_id,
        "task": one.task_id,
        "attempt": one.attempt,
        "kind": "at_most_once" if asked is None else "question",
        "question": one.text,
        "schema": None if asked is None or asked.schema is None else dict(asked.schema),
        "default": None if asked is None else asked.default,
        "deadline": None if asked is None else asked.deadline_at,
        "command": one.command(path),
    }
