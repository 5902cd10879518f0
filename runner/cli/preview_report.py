"""The preview of a run that takes over answers: before the run in a line, or with --dry-run task by task; and what a
person is asked before the run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from anyio import to_thread

from plait.backends.backend_protocol import Backend, ReusableBackend
from plait.backends.specs.agent_specs import AgentSpec, PydanticAISpec
from plait.backends.specs.build_backend import PersonSpec
from plait.errors import InvalidRequest
from plait.runner.cli import run_report
from plait.runner.cli.command_exits import COMPLETED
from plait.runner.cli.terminal_output import as_line, print_line, print_note
from plait.runner.client.backend_set import BackendSet
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview, ReuseStep
from plait.runner.recovery.resume import Preview
from plait.runner.recovery.resume_plan import ResumeAction, ResumeStep
from plait.runner.views.event_sentences import counted
from plait.runner.views.view_models import PreviewView, view_json
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, cost

_WIDEST = max(len(action.value) for action in ReuseAction)
_WIDEST_RESUME = max(len(action.value) for action in ResumeAction)
_NAMED = 5
_LISTED = 20
"""Tasks that are not called are listed up to this number; a longer list would hide the other tasks."""


def print_reuse(preview: ReusePreview, effects: Collection[str], as_json: bool) -> int:
    """Print the action for each task, with the reason and the cost in the earlier run. The run would refuse to run the
    tasks in `effects` again. Return the exit code.
    """
    marked = "has effects: run again only with --again"
    steps = [replace(step, reason=marked) if step.task_id in effects else step for step in preview.tasks]
    preview = replace(preview, tasks=steps)
    if as_json:
        run_report.print_json(preview.as_json())
        return COMPLETED
    reused = len(preview.steps(ReuseAction.REUSE))
    folded = reused > _LISTED
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


async def keep_or_ask_again(preview: ReusePreview) -> bool:
    """Return whether the answers of persons in `preview`, of a run that keeps the answers, are to be kept. Ask at the
    terminal; without one keep none.
    """
    names = [as_line(step.task_id) for step in preview.tasks if step.keeps_answer]
    if not names or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    counted = f"{len(names):,} answers" if len(names) > 1 else "1 answer"
    print_note(f"{counted} of a person in {as_line(preview.like)} to questions that did not change: {_some(names)}")
    # In a thread that is abandoned, so that Ctrl-C ends the command while the thread reads.
    return await to_thread.run_sync(_ask_to_keep, abandon_on_cancel=True)


def _ask_to_keep() -> bool:
    while True:
        print_note("keep, or ask again? [keep/ask]")
        line = sys.stdin.readline()
        if (word := line.strip().lower()) in {"keep", "k"}:
            return True
        if not line or word in {"ask", "a", "ask again"}:
            return False


def list_effects(preview: ReusePreview, backend_set: BackendSet, made: Mapping[str, Backend]) -> list[str]:
    """Return the tasks that would run again although they have effects and completed in the earlier run."""
    return [
        step.task_id
        for step in preview.tasks
        if (step.action is ReuseAction.RUN or step.runs_if_same)
        and step.was_completed
        and (step.at_most_once or _has_effects(step.backend, backend_set, made))
    ]


def _has_effects(name: str, backend_set: BackendSet, made: Mapping[str, Backend]) -> bool:
    """Return whether a call of the backend may change more than its answer: an agent that may write, a tool."""
    spec = backend_set.specs.get(name)
    if isinstance(spec, AgentSpec | PydanticAISpec):
        return not spec.is_harmless
    return not isinstance(spec, PersonSpec) and not isinstance(made.get(name), ReusableBackend)


def require_again(preview: ReusePreview, effects: Sequence[str]) -> None:
    """Raise InvalidRequest if there are tasks with `effects`: a person has to allow that they run again."""
    if effects:
        raise InvalidRequest(
            f"{_some(effects)} completed in {preview.like} and would run again, with effects; --again allows it, "
            f"--dry-run shows every task"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def print_resume(preview: Preview, repaired: Collection[str], as_json: bool) -> int:
    """Print the action of a resume for each task; those in `repaired` take new prompts. Return the exit code."""
    by_plan = "with the prompt of the plan"
    steps = {
        name: replace(step, reason=f"{step.reason}; {by_plan}") if name in repaired else step
        for name, step in preview.tasks.items()
    }
    preview = replace(preview, tasks=steps)
    if as_json:
        run_report.print_json(view_json(PreviewView.of(preview)))
        return COMPLETED
    shown = list(preview.tasks.values())
    others = [step for step in shown if not _is_kept(step)]
    if (kept := len(shown) - len(others)) > _LISTED:
        print_line(
            f"{ResumeAction.KEEP.value:<{_WIDEST_RESUME}}  {kept:,} tasks: {TaskStatus.COMPLETED.value} "
            "(--json names them)"
        )
        shown = others
    for step in shown:
        print_line(f"{step.action.value:<{_WIDEST_RESUME}}  {as_line(step.task_id)}: {as_line(step.reason, 300)}")
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
    count, named = len(preview.damaged), ", ".join(map(as_line, preview.damaged[:_NAMED]))
    more = ", ..." if count > _NAMED else ""
    return f"{counted(count, 'damaged result')}, counted as failed: {named}{more}" if count else ""
