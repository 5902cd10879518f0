"""`plait graph`: draw a plan file or a stored run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import click

from plait.persistence.records import RunRecord, TaskRecord
from plait.runner import DAG, TaskStatus
from plait.runner.cli.display.report import tell_value
from plait.runner.cli.display.text import counted, one_line, seconds, tokens, visible
from plait.runner.cli.exits import COMPLETED, tell
from plait.runner.cli.lookup import adders, find_run, shown_status, store_for_reading
from plait.runner.cli.options import PLAN_SUFFIXES, json_option, read_plan, set_option, store_option
from plait.runner.cli.output_files import write_file
from plait.runner.drawing.picture import Look, mermaid, page, svg
from plait.runner.state.codec import dag_of

_PATH = click.Path(path_type=Path)


@click.command("graph")
@click.argument("what", metavar="PLAN|RUN")
@click.option("-o", "--output", type=_PATH, help="Write a picture to this .html or .svg file.")
@set_option
@store_option
@json_option
def graph_command(what: str, output: Path | None, inputs: dict[str, str], store_path: Path, as_json: bool) -> int:
    """Print the graph of a plan file or of a run as Mermaid, or write it as a picture coloured by status."""
    return draw(what, Delivery(output, as_json), inputs, store_path)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a picture goes: to a file, to standard output as JSON, or as Mermaid."""

    file: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Scene:
    """What is to be drawn. `private`: it shows what a store holds, so a file of it is for its owner alone."""

    dag: DAG
    looks: Mapping[str, Look]
    title: str
    caption: str
    private: bool


def draw(what: str, to: Delivery, inputs: Mapping[str, str], store: Path) -> int:
    """Draw a plan file or a run."""
    if to.file is not None and to.file.suffix.lower() not in {".html", ".svg"}:
        raise click.UsageError(f"-o writes .html or .svg, not {to.file.name!r}")
    if _is_plan(what):
        plan = read_plan(Path(what), inputs)
        _deliver(_Scene(plan.dag, {}, plan.name, "plan", private=False), to)
        return COMPLETED
    if inputs:
        raise click.UsageError("--set is for plans; a run has its inputs")
    run, tasks, added = anyio.run(_stored, store, what)
    looks = {task.task_id: _look(task, added.get(task.task_id)) for task in tasks}
    caption = f"run {run.run_id}, {shown_status(run).value}"
    _deliver(_Scene(dag_of(run, tasks), looks, run.name or "plait", caption, private=True), to)
    return COMPLETED


def _is_plan(what: str) -> bool:
    path = Path(what)
    return path.is_file() or path.suffix.lower() in PLAN_SUFFIXES or os.sep in what


async def _stored(path: Path, word: str) -> tuple[RunRecord, tuple[TaskRecord, ...], dict[str, str]]:
    """The run, its tasks, and who added which of them."""
    async with store_for_reading(path) as store:
        run = await find_run(store, word)
        tasks = await store.list_tasks(run.run_id)
        return run, tasks, await adders(store, run, tasks)


def _look(task: TaskRecord, by: str | None) -> Look:
    status = TaskStatus(task.status)
    used = tokens(task.input_tokens, task.output_tokens)
    added = f"added by {by}" if by else ""
    note = " · ".join(filter(None, (status.value.replace("_", " "), seconds(task.duration_s), used, added)))
    attempts = f", {counted(task.attempt, 'attempt')}" if task.attempt else ""
    error = f"\n{task.error_kind}: {one_line(task.error or '', 300)}" if task.error_kind else ""
    return Look(status, note, f"{task.task_id}: {status.value}{attempts}{added and ', '}{added}{error}", by)


def _as_value(scene: _Scene) -> dict[str, Any]:
    tasks = [
        {
            "task_id": task.id,
            "depends_on": task.upstream,
            "status": look.status and look.status.value,
            "added_by": look.added_by,
        }
        for task in scene.dag
        for look in [scene.looks.get(task.id, Look())]
    ]
    return {"name": scene.title, "tasks": tasks, "mermaid": mermaid(scene.dag, scene.looks)}


def _deliver(scene: _Scene, to: Delivery) -> None:
    output = to.file
    if to.as_json:
        tell_value(_as_value(scene))
        if output is None:
            return
    if output is None:
        tell(mermaid(scene.dag, scene.looks).removesuffix("\n"))
        return
    make = page if output.suffix.lower() == ".html" else svg
    picture = make(scene.dag, scene.looks, title=visible(scene.title), caption=visible(scene.caption))
    write_file(output, picture, private=scene.private)
