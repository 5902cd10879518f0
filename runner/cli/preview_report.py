"""What --dry-run prints before a run: its first prompts, calls and cost, or with --like, task by task, which answers it
takes over, also in a line before the run; and what a person is asked before the run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from anyio import to_thread

from plait.errors import InvalidRequest
from plait.runner.cli.command_line import COMPLETED
from plait.runner.cli.follow_run import OutputOptions
from plait.runner.cli.terminal_output import as_line, print_json, print_line, print_note, print_section, print_table
from plait.runner.client.reuse_preview import ReuseAction, ReusePreview, ReuseStep
from plait.runner.client.run_estimate import ANSWER_TOKENS, TOKEN_CHARACTERS, RunEstimate
from plait.runner.recovery.resume_plan import ResumeAction
from plait.runner.views.event_sentences import counted, named_tasks, tokens
from plait.runner.views.view_models import Preview
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, cost, dollars

_PROMPTS = 3
"""First prompts that are printed."""
_PROMPT_CHARACTERS = 2_000
_LISTED = 20
"""Tasks that are not called are listed up to this number; a longer list would hide the other tasks."""


def announce_reuse(
    preview: ReusePreview, effects: Sequence[str], options: OutputOptions, *, dry_run: bool
) -> int | None:
    """Tell what a run that takes over answers of an earlier one does, before it begins. Return the exit code if that is
    all, with `dry_run`. Raises InvalidRequest if the tasks in `effects`, which have effects, would run again.
    """
    if dry_run:
        return _print_reuse(preview, effects, options.as_json)
    if effects:
        raise InvalidRequest(
            f"{named_tasks(effects)} completed in {preview.like} and would run again, with effects; --again allows it, "
            f"--dry-run shows every task"
        )
    told = _tell_paid_again(preview) if options.quiet else _summarize_reuse(preview)
    if told is not None:
        print_note(told)
    return None


def _print_reuse(preview: ReusePreview, effects: Collection[str], as_json: bool) -> int:
    """Print the action for each task, with the reason and the cost in the earlier run. The run would refuse to run the
    tasks in `effects` again. Return the exit code.
    """
    marked = "has effects: run again only with --again"
    steps = (replace(step, reason=marked) if step.task_id in effects else step for step in preview.tasks)
    preview = replace(preview, tasks=tuple(steps))
    if as_json:
        print_json(preview)
        return COMPLETED
    lines: list[tuple[StrEnum, str, bool]] = []
    for step in preview.tasks:
        is_kept = step.action is ReuseAction.REUSE
        last = f" ({cost(step.usage)} last time)" if cost(step.usage) and not is_kept else ""
        lines.append((step.action, f"{as_line(step.task_id)}: {as_line(step.reason, 300)}{last}", is_kept))
    _print_steps(lines, "tasks")
    print_line(_summarize_reuse(preview))
    return COMPLETED


def print_estimate(estimate: RunEstimate, as_json: bool) -> int:
    """Print the first prompts of a run, its calls and what they will cost, with what was assumed. Return the exit
    code.
    """
    if as_json:
        print_json(estimate)
        return COMPLETED
    for task in [task for task in estimate.tasks if task.prompt][:_PROMPTS]:
        prompt = task.prompt or ""
        cut = f"\n... {len(prompt):,} characters" if len(prompt) > _PROMPT_CHARACTERS else ""
        head = f"{as_line(task.task_id)}, the first of {task.calls:,} prompts" if task.calls > 1 else task.task_id
        print_section(head, prompt[:_PROMPT_CHARACTERS] + cut)
    rows = [("TASK", "CALLS", "BACKEND", "TOKENS", "COST", "BY")]
    for task in estimate.tasks:
        used_tokens, price, by = "unknown", "unknown", ""
        if task.usage is not None:
            used = task.usage.usage
            used_tokens, price = tokens(used), cost(used)
            by = counted(task.earlier_calls, "earlier call") if task.earlier_calls else "assumption"
            by = by if used_tokens else ""
            if task.is_judge and task.earlier_calls:
                used_tokens, by = "", "in the task's"
        calls = f"{task.calls:,}" if task.length_is_known else "unknown"
        name = f"{as_line(task.task_id)}, judge" if task.is_judge else as_line(task.task_id)
        rows.append((name, calls, as_line(task.backend), used_tokens, price, by))
    print_line("")
    print_table(rows, 0, [None] * len(rows), frozenset({1, 3, 4}))
    for line in _summarize_estimate(estimate):
        print_line(line)
    return COMPLETED


def _summarize_estimate(estimate: RunEstimate) -> Iterator[str]:
    is_floor = estimate.grows or any(task.usage is None or not task.length_is_known for task in estimate.tasks)
    used = estimate.usage.usage
    parts = (counted(estimate.calls, "call"), tokens(used, " tokens"), cost(used))
    yield f"{'at least' if is_floor else 'about'} {', '.join(filter(None, parts))}"
    if estimate.refused is not None:
        yield f"would be refused: {estimate.refused}"
    elif estimate.budget is not None:
        most = "an unknown sum" if estimate.most_usd is None else f"at most {dollars(estimate.most_usd)}"
        given = "" if estimate.most_usd is None else " and ".join(estimate.most_assumes)
        yield f"{most} of the budget of {dollars(estimate.budget)}, without retries{f', if {given}' if given else ''}"
    if estimate.like is not None and any(task.earlier_calls for task in estimate.tasks):
        yield f"by earlier calls: the mean of those of run {estimate.like} of {(estimate.like_created_at or '')[:10]}"
    if estimate.assumed is not None:
        yield (
            f"by assumption: {TOKEN_CHARACTERS} characters for a token, {ANSWER_TOKENS} tokens for an answer, no "
            "retries, nothing from a provider's cache; a pilot (--limit 5) tells more"
        )
    if any(task.usage is None for task in estimate.tasks):
        yield "unknown: what agents and backends without a price use, until a run of the plan shows it"
    if not all(task.length_is_known for task in estimate.tasks):
        yield "unknown: the length of a list that a task answers, or the rounds of a loop, counted as one"
    if estimate.grows:
        yield "not counted: tasks that are added during the run"


def _summarize_reuse(preview: ReusePreview) -> str:
    """Return how many tasks take answers over, how many run, and the cost of these tasks in the earlier run."""
    parts = [f"{preview.reuse:,} reused", _counted(preview.steps(ReuseAction.RUN), "run")]
    depends = preview.steps(ReuseAction.DEPENDS)
    for steps, word in (
        ([step for step in depends if not step.runs_if_same], "unless"),
        ([step for step in depends if step.runs_if_same], "if"),
    ):
        if steps:
            parts.append(_counted(steps, f"run {word} the tasks before give the same answers"))
    return f"like {as_line(preview.like)} of {preview.created_at[:10]}: {', '.join(parts)}"


def _tell_paid_again(preview: ReusePreview) -> str | None:
    """Return how many tasks run again although they completed in the earlier run and the caller did not ask for them,
    and why the first does; None without such tasks.
    """
    again = [step for step in preview.steps(ReuseAction.RUN) if step.was_completed and not step.is_fresh]
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
    answers = f"{counted(len(names), 'answer')} of a person in {as_line(preview.like)}"
    print_note(f"{answers} to questions that did not change: {named_tasks(names)}")
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


def print_resume(preview: Preview, repaired: Collection[str], as_json: bool) -> int:
    """Print the action of a resume for each task; those in `repaired` take new prompts. Return the exit code."""
    by_plan = "with the prompt of the plan"
    steps = {
        name: replace(step, reason=f"{step.reason}; {by_plan}") if name in repaired else step
        for name, step in preview.tasks.items()
    }
    preview = replace(preview, tasks=steps)
    if as_json:
        print_json(preview)
        return COMPLETED
    lines: list[tuple[StrEnum, str, bool]] = []
    done = TaskStatus.COMPLETED.value
    for step in preview.tasks.values():
        is_kept = step.action is ResumeAction.KEEP and step.reason == done
        lines.append((step.action, f"{as_line(step.task_id)}: {as_line(step.reason, 300)}", is_kept))
    _print_steps(lines, f"tasks: {done}")
    print_line(_summarize(preview))
    return COMPLETED


def _print_steps(lines: Sequence[tuple[StrEnum, str, bool]], those: str) -> None:
    """Print a line behind the action of each task; the tasks that are kept are one line if they are many."""
    kept = [action for action, _, is_kept in lines if is_kept]
    folded = len(kept) > _LISTED
    widest = max((len(one) for action, _, _ in lines[:1] for one in type(action)), default=0)
    if folded:
        print_line(f"{kept[0].value:<{widest}}  {len(kept):,} {those} (--json names them)")
    for action, line, is_kept in lines:
        if not (folded and is_kept):
            print_line(f"{action.value:<{widest}}  {line}")


def _summarize(preview: Preview) -> str:
    run = f"run {preview.run_id}"
    if preview.ended:
        hint = "; --retry-failed runs what failed again" if preview.status is RunStatus.FAILED else ""
        left = _summarize_damage(preview) or "nothing is left to do"
        return f"{run} is {preview.status.value}; {left}{hint}"
    counts = Counter(step.action for step in preview.tasks.values())
    parts = [f"{counts[action]:,} {action.value}" for action in ResumeAction if counts[action]]
    again = preview.possibly_billed_twice
    bill = f"{counted(again, 'task')} possibly billed twice" if again else "nothing billed twice"
    if again:
        bill += f", about {preview.repeated_input_tokens:,} input tokens and the output before the interruption"
    return "; ".join(filter(None, (f"{run}: {', '.join(parts)}", bill, _summarize_damage(preview))))


def _summarize_damage(preview: Preview) -> str:
    """Return the damage to results of tasks that would not run again; empty without damage."""
    damaged = [as_line(name) for name in preview.damaged]
    return f"{counted(len(damaged), 'damaged result')}, counted as failed: {named_tasks(damaged)}" if damaged else ""
