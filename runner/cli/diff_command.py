"""`plait diff`: compare two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from plait.clock_and_ids import parse_time
from plait.runner.cli.command_options import async_command, complete, json_option, store_option
from plait.runner.cli.terminal_output import as_line, print_field, print_json, print_line, print_section, visible
from plait.runner.client.named_runs import find_run
from plait.runner.engine.run_options import StorePlace, open_store
from plait.runner.views.event_sentences import counted, failure, seconds, tokens
from plait.runner.views.run_differences import Piece, TaskDifference, compare_runs
from plait.runner.views.view_models import TaskView
from plait.usage import Usage, cost

_CONTEXT = 8
"""The words of unchanged text that are shown on each side of a change."""
_MARKS = {"removed": ("[-", "-]"), "added": ("{+", "+}")}


@async_command("diff")
@click.argument("a", metavar="RUN", shell_complete=complete)
@click.argument("b", metavar="OTHER", shell_complete=complete)
@store_option
@json_option
async def diff_command(a: str, b: str, store_path: StorePlace, as_json: bool) -> None:
    """Compare RUN with OTHER, task by task: prompt, result, status, tokens, cost and time, and the first task where the
    runs parted.

    Words of RUN alone are shown as [-these-], words of OTHER alone as {+these+}. Parts of a `for_each` are compared by
    their element, not by their number.
    """
    async with open_store(store_path, "read") as store:
        before, after = await find_run(store, a), await find_run(store, b)
        comparison = await compare_runs(store, before.run_id, after.run_id)
    if as_json:
        print_json(comparison)
        return
    for name, run in (("run", comparison.a), ("other", comparison.b)):
        ends = run.started_at, run.ended_at
        took = None if None in ends else parse_time(run.ended_at or "") - parse_time(run.started_at or "")
        print_field(name, f"{run.run_id}, {', '.join(_facts(run.status, run.usage, took))}")
    for task in comparison.tasks[:1]:
        print_field("parted", f"at {_head(task)}")
    for task in comparison.tasks:
        _print_difference(task)
    changed = counted(len(comparison.tasks), "task")
    print_line(f"{chr(10) if comparison.tasks else ''}{changed} changed, {comparison.same:,} the same")


def _head(task: TaskDifference) -> str:
    why = task.why or f"another {' and '.join(task.changed)}"
    cut_off = "; same answer: cut off here" if task.changed == ("prompt",) else ""
    return f"{as_line(task.task_id)}: {as_line(why)}{cut_off}"


def _print_difference(task: TaskDifference) -> None:
    before, after, lines = task.a, task.b, list[str]()
    if before is None or after is None:
        side = before or after
        assert side is not None
        lines += [f"{'prompt':<9} {visible(side.prompt)}", f"{'result':<9} {visible(side.text or '')}"]
        lines.append(f"{'status':<9} {_facts_of(side)}")
    else:
        if "prompt" in task.changed:
            lines.append(f"{'prompt':<9} {_marked(task.words['prompt'])}")
        if "result" in task.changed:
            lines.append(f"{'result':<9} {_marked(task.words['result'])}")
        was, now = _facts_of(before), _facts_of(after)
        lines.append(f"{'status':<9} {was}{'' if was == now else f' -> {now}'}")
    print_section(_head(task), "\n".join(lines))


def _facts_of(task: TaskView) -> str:
    error = as_line(failure(task.error_kind, task.error), 120)
    return ", ".join([*_facts(task.status, task.usage, task.duration_s), *filter(None, [error])])


def _facts(status: str, usage: Usage, duration: float | None) -> Iterator[str]:
    yield from filter(None, [status, tokens(usage, " tokens"), cost(usage), seconds(duration)])


def _marked(pieces: Sequence[Piece]) -> str:
    """Return the differing words of two texts with marks, and the words around them."""
    if all(piece["change"] == "kept" for piece in pieces):
        return "only white space differs"
    shown = [_shown(piece, number == 0, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return visible("".join(shown)).strip("\n")


def _shown(piece: Piece, is_first: bool, is_last: bool) -> str:
    text = piece["text"]
    if piece["change"] != "kept":
        start, end = _MARKS[piece["change"]]
        inner = text.strip()
        lead = text[: len(text) - len(text.lstrip())]
        return f"{lead}{start}{inner}{end}"
    words = text.split()
    if len(words) <= 2 * _CONTEXT:
        return text
    left = "" if is_first else " " + " ".join(words[:_CONTEXT])
    right = "" if is_last else " ".join(words[-_CONTEXT:])
    return f"{left} … {right}" if left and right else (f"{left} …" if left else f"… {right}")
