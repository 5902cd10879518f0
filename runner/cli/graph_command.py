"""`plait graph`: draw a plan file or a stored run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import click

from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.command_line import COMPLETED
from plait.runner.cli.command_options import PLAN_SUFFIXES, complete, json_option, read_plan, set_option, store_option
from plait.runner.cli.terminal_output import as_line, print_json, print_line, visible, write_file
from plait.runner.client.named_runs import find_run
from plait.runner.domain.dag import DAG
from plait.runner.drawing.dag_picture import Look, fold, mermaid, page, svg
from plait.runner.engine.lease import shown_status
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.policies.step_workflow import Workflow
from plait.runner.state.stored_run import decode_dag, listed_tasks
from plait.runner.views.event_sentences import counted, failure, seconds, tokens
from plait.runner.views.read_views import find_adders
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
    if output is not None and output.suffix.lower() not in {".html", ".svg"}:
        raise click.UsageError(f"-o writes .html or .svg, not {output.name!r}")
    path, looks = Path(what), dict[str, Look]()
    is_plan = path.is_file() or path.suffix.lower() in PLAN_SUFFIXES or os.sep in what
    if is_plan:
        plan = read_plan(path, inputs)
        # The run of a workflow begins with its first step alone.
        dag = plan.policy.outline(plan.dag.inputs) if isinstance(plan.policy, Workflow) else plan.dag
        title, caption = plan.name, "plan"
    elif inputs:
        raise click.UsageError("--set is for plans; a run has its inputs")
    else:
        run, tasks, added = anyio.run(_load_run, store_path, what)
        looks = {task.task_id: _node_style(task, added.get(task.task_id)) for task in tasks}
        dag, title = decode_dag(run, tasks), run.name or "plait"
        caption = f"run {run.run_id}, {shown_status(run).value}"
    folded = fold(dag, looks)
    if as_json:
        print_json({"name": title, "tasks": _tasks_json(dag, looks), "mermaid": mermaid(*folded)})
    if output is not None:
        make = page if output.suffix.lower() == ".html" else svg
        picture = make(*folded, title=visible(title), caption=visible(caption))
        write_file(output, picture, private=not is_plan)  # a picture of a run shows data of the store
    elif not as_json:
        print_line(mermaid(*folded).removesuffix("\n"))
    return COMPLETED


async def _load_run(path: StorePlace, word: str) -> tuple[RunRecord, tuple[TaskRecord, ...], dict[str, str]]:
    """Return the run, its tasks, and the origin of each added task."""
    async with open_store(path, "read") as store:
        run = await find_run(store, word)
        tasks = await listed_tasks(store, run)
        return run, tasks, await find_adders(store, run, tasks)


def _node_style(task: TaskRecord, by: str | None) -> Look:
    status = TaskStatus(task.status)
    used = tokens(task.usage, " tokens")
    added = f"added by {by}" if by else ""
    note = " · ".join(filter(None, (status.value.replace("_", " "), seconds(task.duration_s), used, added)))
    attempts = f", {counted(task.attempt, 'attempt')}" if task.attempt else ""
    error = as_line(failure(task.error_kind, task.error), 300)
    title = f"{task.task_id}: {status.value}{attempts}{added and ', '}{added}"
    return Look(status, note, "\n".join(filter(None, (title, error))), by)


def _tasks_json(dag: DAG, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    return [
        {
            "task_id": task.id,
            "depends_on": task.upstream,
            "status": look.status and look.status.value,
            "added_by": look.added_by,
        }
        for task in dag
        for look in [looks.get(task.id, Look())]
    ]
