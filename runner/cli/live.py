"""What happens in a run, live on a terminal: progress, what runs, what waits on what; lines of what is over above it.

Nothing is ever parsed as markup: every piece is a `rich.text.Text` made of text that went through `visible`.
"""

from __future__ import annotations

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from runner import events
from runner.cli.colour import COLOURS
from runner.cli.plain import line_of
from runner.cli.progress import Progress, Underway
from runner.cli.text import dollars, one_line, seconds, tokens
from runner.status import TaskStatus

_MANY = 100  # tasks; in a larger run only trouble gets a line of its own
_BAR = 24
_MOST_WAITING = 4
_OTHER_LINES = 4  # header, a blank line, "and n more", and one for the cursor
_COUNTED = (TaskStatus.RUNNING, TaskStatus.WAITING_INPUT, TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.CANCELLED)


class LiveDisplay:
    """Drawn anew at every `tick`; removed at `close`, but for the lines of what is over."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = one_line(title)
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            auto_refresh=False,
            transient=True,
            # What a function prints goes above the display, unless it goes to a file anyway.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._lines: list[Text] = []
        self._live.start(refresh=True)

    def take(self, event: events.Event) -> None:
        self._progress.take(event)
        if self._deserves_line(event):
            self._lines.append(Text(line_of(event), style=_colour(event)))

    def note(self, text: str) -> None:
        self._lines.append(Text(one_line(text), style="bold"))
        self.tick()

    def tick(self) -> None:
        if self._lines:
            # All at once, because every print draws the display again.
            lines, self._lines = self._lines, []
            self._console.print(*lines, sep="\n", soft_wrap=True)
        self._live.refresh()

    def close(self) -> None:
        self.tick()
        self._live.stop()

    def _deserves_line(self, event: events.Event) -> bool:
        if isinstance(event, events.TaskCompleted):
            return len(self._progress.dag) <= _MANY
        return isinstance(
            event,
            events.TaskFailed
            | events.TaskRetrying
            | events.TaskInterrupted
            | events.TaskWaiting
            | events.TaskAnswered
            | events.TasksAdded
            | events.StoreDegraded
            | events.StoreRecovered
            | events.RunResumed
            | events.RunCancelling,
        )

    def _draw(self) -> Group:
        progress = self._progress
        room = max(self._console.height - _OTHER_LINES - _MOST_WAITING - min(len(progress.questions), _MOST_WAITING), 1)
        running = list(progress.running.items())
        lines = [Text(""), self._header()]
        lines += [self._running_line(task_id, one) for task_id, one in running[:room]]
        if len(running) > room:
            lines.append(_plain(f"  and {len(running) - room} more", "dim"))
        now = progress.clock()
        for task_id, until in list(progress.retries.items())[:_MOST_WAITING]:
            lines.append(_plain(f"  ↻ {one_line(task_id)} tries again in {seconds(max(until - now, 0))}", "yellow"))
        for task_id, question in list(progress.questions.items())[:_MOST_WAITING]:
            lines.append(_plain(f"  ? {one_line(task_id)}  {one_line(question)}", "magenta"))
        lines += [self._waiting_line(task_id, before) for task_id, before in progress.waiting(_MOST_WAITING)]
        return Group(*lines)

    def _header(self) -> Text:
        progress = self._progress
        total = len(progress.dag)
        full = _BAR * progress.done // total
        line = _plain("", "")
        line.append(f"{self._title}  ", style="bold")
        line.append("━" * full, style="red" if progress.counts[TaskStatus.FAILED] else "green")
        line.append("━" * (_BAR - full), style="bright_black")
        line.append(f" {progress.done}/{total}")
        counts = [
            f"{progress.counts[status]} {status.value.replace('_', ' ')}"
            for status in _COUNTED
            if progress.counts[status]
        ]
        usage = progress.usage
        used = tokens(usage.input_tokens, usage.output_tokens)
        parts = [*counts, f"{used} tokens" if used else "", dollars(usage.cost_usd)]
        parts.append(seconds(progress.clock() - progress.began))
        line.append("  " + " · ".join(part for part in parts if part))
        if progress.degraded is not None:
            line.append("  the store is away", style="red")
        return line

    def _running_line(self, task_id: str, one: Underway) -> Text:
        line = _plain(f"  ▸ {one_line(task_id)}", "cyan")
        again = f" attempt {one.attempt}" if one.attempt > 1 else ""
        line.append(f"  {seconds(self._progress.clock() - one.since)} {one_line(one.backend)}{again}", style="dim")
        room = self._console.width - line.cell_len - 4
        said = one_line(one.tail)
        if said and room > 8:
            line.append("  " + (said if len(said) <= room else "…" + said[1 - room :]))
        return line

    def _waiting_line(self, task_id: str, before: list[str]) -> Text:
        failed = [one for one in before if self._progress.statuses[one] is TaskStatus.FAILED]
        named = failed or before
        shown = ", ".join(map(one_line, named[:3])) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
        why = f"blocked by {shown}" if failed else f"waits for {shown}" if shown else "waits for a place"
        return _plain(f"  · {one_line(task_id)}  {why}", "dim")


def _plain(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _colour(event: events.Event) -> str:
    match event:
        case events.TaskCompleted():
            return COLOURS[TaskStatus.COMPLETED]
        case events.TaskFailed():
            return COLOURS[event.status]
        case events.StoreDegraded():
            return "red"
        case _:
            return "yellow"
