"""`plait graph`: draw a plan file or a stored run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import click

from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.command_exits import COMPLETED
from plait.runner.cli.command_options import PLAN_SUFFIXES, complete, json_option, read_plan, set_option, store_option
from plait.runner.cli.output_files import write_file
from plait.runner.cli.run_report import print_json
from plait.runner.cli.terminal_output import as_line, print_line, visible
from plait.runner.client.store_place import StorePlace, find_run, read_only_store
from plait.runner.domain.dag import DAG
from plait.runner.drawing.dag_picture import Look, fold, mermaid, page, svg
from plait.runner.policies.step_workflow import Workflow
from plait.runner.state.codec import decode_dag
from plait.runner.views.event_sentences import counted, seconds, tokens
from plait.runner.views.read_views import find_adders, shown_status
from plait.statuses import TaskStatus

_PATH = click.Path(path_type=Path)


@click.command("graph")
@click.argument("what", metavar="PLAN|RUN", shell_complete=complete)
@click.option("-o", "--output", type=_PATH, help="Write a picture to this .html or .svg file.")
@set_option
@store_option
@json_option
def graph_command(what: str, output: Path | None, inputs: dict[str, str], store_path: StorePlace, as_json: bool) -> int:
    """Print the graph of a plan file or of a run as Mermaid, or write a picture, coloured by status.

    Beyond 200 tasks the parts of a `for_each` are one box with their counts by status.
    """
    return draw(what, DrawingTarget(output, as_json), inputs, store_path)


@dataclass(frozen=True, slots=True)
class DrawingTarget:
    """Where a drawing goes: to a file, to standard output as JSON, or to standard output as Mermaid."""

    file: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A DAG to draw, with its title and caption."""

    dag: DAG
    looks: Mapping[str, Look]
    title: str
    caption: str
    private: bool
    """The drawing shows data of a store, so a file is readable by its owner only."""


def draw(what: str, to: DrawingTarget, inputs: Mapping[str, str], store: StorePlace) -> int:
    """Draw a plan file or a run. Return the exit code."""
    if to.file is not None and to.file.suffix.lower() not in {".html", ".svg"}:
        raise click.UsageError(f"-o writes .html or .svg, not {to.file.name!r}")
    if _is_plan_file(what):
        plan = read_plan(Path(what), inputs)
        # The run of a workflow begins with its first step alone.
        dag = plan.policy.outline(plan.dag.inputs) if isinstance(plan.policy, Workflow) else plan.dag
        _write_drawing(_Drawing(dag, {}, plan.name, "plan", private=False), to)
        return COMPLETED
    if inputs:
        raise click.UsageError("--set is for plans; a run has its inputs")
    run, tasks, added = anyio.run(_load_run, store, what)
    looks = {task.task_id: _node_style(task, added.get(task.task_id)) for task in tasks}
    caption = f"run {run.run_id}, {shown_status(run).value}"
    _write_drawing(_Drawing(decode_dag(run, tasks), looks, run.name or "plait", caption, private=True), to)
    return COMPLETED


def _is_plan_file(what: str) -> bool:
    path = Path(what)
    return path.is_file() or path.suffix.lower() in PLAN_SUFFIXES or os.sep in what


async def _load_run(path: StorePlace, word: str) -> tuple[RunRecord, tuple[TaskRecord, ...], dict[str, str]]:
    """Return the run, its tasks, and the origin of each added task."""
    async with read_only_store(path) as store:
        run = await find_run(store, word)
        tasks = await store.list_tasks(run.run_id)
        return run, tasks, await find_adders(store, run, tasks)


def _node_style(task: TaskRecord, by: str | None) -> Look:
    status = TaskStatus(task.status)
    count = tokens(task.usage.input_tokens, task.usage.output_tokens)
    used = f"{count} tokens" if count else ""
    added = f"added by {by}" if by else ""
    note = " · ".join(filter(None, (status.value.replace("_", " "), seconds(task.duration_s), used, added)))
    attempts = f", {counted(task.attempt, 'attempt')}" if task.attempt else ""
    error = f"\n{task.error_kind}: {as_line(task.error or '', 300)}" if task.error_kind else ""
    return Look(status, note, f"{task.task_id}: {status.value}{attempts}{added and ', '}{added}{error}", by)


def _as_json(drawing: _Drawing) -> dict[str, Any]:
    tasks = [
        {
            "task_id": task.id,
            "depends_on": task.upstream,
            "status": look.status and look.status.value,
            "added_by": look.added_by,
        }
        for task in drawing.dag
        for look in [drawing.looks.get(task.id, Look())]
    ]
    return {"name": drawing.title, "tasks": tasks, "mermaid": mermaid(*fold(drawing.dag, drawing.looks))}


def _write_drawing(drawing: _Drawing, to: DrawingTarget) -> None:
    output = to.file
    if to.as_json:
        print_json(_as_json(drawing))
        if output is None:
            return
    if output is None:
        print_line(mermaid(*fold(drawing.dag, drawing.looks)).removesuffix("\n"))
        return
    make = page if output.suffix.lower() == ".html" else svg
    picture = make(*fold(drawing.dag, drawing.looks), title=visible(drawing.title), caption=visible(drawing.caption))
    write_file(output, picture, private=drawing.private)
