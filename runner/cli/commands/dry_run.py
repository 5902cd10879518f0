"""`plait resume --dry-run`: print the action of a resume for each task."""

from __future__ import annotations

from collections import Counter

from plait.runner.cli.display import report
from plait.runner.cli.display.text import as_line, counted
from plait.runner.cli.exits import COMPLETED, print_line
from plait.runner.recovery.preview import Preview
from plait.runner.recovery.resume_plan import ResumeAction, ResumeStep
from plait.statuses import RunStatus, TaskStatus

_WIDEST = max(len(action.value) for action in ResumeAction)
_MOST_NAMED = 5
_MOST_KEPT = 20
"""Completed tasks are listed up to this number; a longer list would hide the other tasks."""


def print_preview(preview: Preview, as_json: bool) -> int:
    """Print the preview. Return the exit code."""
    if as_json:
        report.print_json(preview.as_json())
        return COMPLETED
    shown = list(preview.tasks.values())
    others = [step for step in shown if not _is_kept(step)]
    if (kept := len(shown) - len(others)) > _MOST_KEPT:
        print_line(
            f"{ResumeAction.KEEP.value:<{_WIDEST}}  {kept:,} tasks: {TaskStatus.COMPLETED.value} (--json names them)"
        )
        shown = others
    for step in shown:
        print_line(f"{step.action.value:<{_WIDEST}}  {as_line(step.task_id)}: {as_line(step.reason, 300)}")
    print_line(_summarize(preview))
    return COMPLETED


def _is_kept(step: ResumeStep) -> bool:
    return step.action is ResumeAction.KEEP and step.reason == TaskStatus.COMPLETED.value


def _summarize(preview: Preview) -> str:
    run = f"run {preview.run_id}"
    if preview.ended:
        hint = "; --retry-failed runs what failed again" if preview.status is RunStatus.FAILED else ""
        left = _summarize_damage(preview) or "nothing is left to do"
        return f"{run} is {preview.status.value}; {left}{hint}"
    counts = Counter(step.action for step in preview.tasks.values())
    parts = [f"{counts[action]:,} {action.value}" for action in ResumeAction if counts[action]]
    again = len(preview.repeats)
    bill = f"{counted(again, 'task')} possibly billed twice" if again else "nothing billed twice"
    if again:
        bill += f", about {preview.repeated_input_tokens:,} input tokens and the output before the interruption"
    return "; ".join(filter(None, (f"{run}: {', '.join(parts)}", bill, _summarize_damage(preview))))


def _summarize_damage(preview: Preview) -> str:
    """Return the damage to results of tasks that would not run again; empty without damage."""
    count, named = len(preview.damaged), ", ".join(map(as_line, preview.damaged[:_MOST_NAMED]))
    more = ", ..." if count > _MOST_NAMED else ""
    return f"{counted(count, 'damaged result')}, counted as failed: {named}{more}" if count else ""
