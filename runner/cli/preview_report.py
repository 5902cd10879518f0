"""The preview of a run that takes over answers: before the run in a line, or with --dry-run task by task."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from plait.runner.cli import run_report
from plait.runner.cli.command_exits import COMPLETED, print_line
from plait.runner.cli.terminal_output import as_line
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview, ReuseStep
from plait.usage import NO_USAGE, cost

_WIDEST = max(len(action.value) for action in ReuseAction)
_MOST_REUSED = 20
"""Tasks that take an answer over are listed up to this number; a longer list would hide the other tasks."""


def print_reuse(preview: ReusePreview, as_json: bool) -> int:
    """Print the action for each task, with the reason and the cost in the earlier run. Return the exit code."""
    if as_json:
        run_report.print_json(preview.as_json())
        return COMPLETED
    reused = len(preview.steps(ReuseAction.REUSE))
    folded = reused > _MOST_REUSED
    if folded:
        print_line(f"{ReuseAction.REUSE.value:<{_WIDEST}}  {reused:,} tasks (--json names them)")
    for step in preview.tasks:
        if folded and step.action is ReuseAction.REUSE:
            continue
        last = cost(step.usage) if step.action is not ReuseAction.REUSE else ""
        line = f"{step.action.value:<{_WIDEST}}  {as_line(step.task_id)}: {as_line(step.reason, 300)}"
        print_line(f"{line} ({last} last time)" if last else line)
    print_line(summarize_reuse(preview))
    return COMPLETED


def summarize_reuse(preview: ReusePreview) -> str:
    """Return how many tasks take answers over, how many run, and the cost of these tasks in the earlier run."""
    parts = [f"{len(preview.steps(ReuseAction.REUSE)):,} reused", _counted(preview.steps(ReuseAction.RUN), "run")]
    depends = preview.steps(ReuseAction.DEPENDS)
    for steps, word in (
        ([step for step in depends if not step.runs_if_same], "unless"),
        ([step for step in depends if step.runs_if_same], "if"),
    ):
        if steps:
            parts.append(_counted(steps, f"run {word} the tasks before give the same answers"))
    return f"like {as_line(preview.like)} of {preview.created_at[:10]}: {', '.join(parts)}"


def tell_paid_again(preview: ReusePreview) -> str | None:
    """Return how many tasks run again although they completed in the earlier run and the caller did not ask for them,
    and why the first does; None without such tasks.
    """
    fresh = () if preview.reuse is None else preview.reuse.fresh
    again = [
        step
        for step in preview.steps(ReuseAction.RUN)
        if step.was_completed and step.task_id not in fresh and step.task_id.rpartition(".")[0] not in fresh
    ]
    if not again:
        return None
    first, like = as_line(again[0].task_id), as_line(preview.like)
    which = f"{first} completed in {like} and runs again"
    if len(again) > 1:
        which = f"{len(again):,} tasks completed in {like} and run again, first {first}"
    return f"{which}: {as_line(again[0].reason, 300)}"


def _counted(steps: Sequence[ReuseStep], verb: str) -> str:
    last = cost(sum((step.usage for step in steps), NO_USAGE))
    return f"{len(steps):,} {verb}{f' ({last} last time)' if last else ''}"


def with_effects_marked(preview: ReusePreview, effects: Collection[str]) -> ReusePreview:
    """Return the preview with another reason for the tasks in `effects`, which the run refuses to run again."""
    tasks = [
        replace(step, reason="has effects: run again only with --again") if step.task_id in effects else step
        for step in preview.tasks
    ]
    return replace(preview, tasks=tasks)
