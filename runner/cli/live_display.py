"""Live display of a run on a terminal: progress, one line for each running task, and waiting tasks with their reasons.
Lines about ended tasks scroll above the display.

No text is parsed as markup: each piece is a `rich.text.Text` of text that `visible` has cleaned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from plait import events
from plait.runner.cli.run_report import Display, Progress, RunningAttempt
from plait.runner.cli.terminal_output import COLOURS, as_line, columns, last_cells
from plait.runner.views.event_sentences import event_line, event_sentence, is_detail, seconds, throttling, tokens
from plait.statuses import TASK_DONE, TaskStatus
from plait.usage import cost

_MANY = 100  # tasks; in larger runs completed tasks get no line
_BAR = 24
_MOST_WAITING = 4
_OTHER_LINES = 4  # the header, a blank line, "and n more", and a line for the cursor
_LONGEST_NAME = 30
_IDLE = 1.0  # seconds between two pictures while only the times change
_STYLES = {"waiting": "yellow", "notice": "yellow"}
_COUNTED = (TaskStatus.RUNNING, TaskStatus.WAITING_INPUT, TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.CANCELLED)


class LiveDisplay(Display):
    """Drawn at a `tick` if an event has come; removed at `close`, except for the lines about ended tasks."""

    def __init__(self, progress: Progress, title: str, *, verbose: bool = False) -> None:
        self._progress = progress
        self._verbose = verbose
        self._title = as_line(title)
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            auto_refresh=False,
            transient=True,
            # output of a user's function goes above the display
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._lines: list[Text] = []
        self._has_news = False
        self._drawn = progress.clock()
        self._live.start(refresh=True)

    def handle(self, event: events.Event) -> None:
        self._has_news = True
        if self._prints_line(event):
            self._lines.append(Text(as_line(event_line(event)), style=_line_style(event)))

    def note(self, text: str) -> None:
        self._lines.append(Text(as_line(text), style="bold"))
        self.tick()

    def tick(self) -> None:
        if self._lines:
            # in one call, because each print draws the display again
            lines, self._lines = self._lines, []
            self._console.print(*lines, sep="\n", soft_wrap=True)
        now = self._progress.clock()
        if self._has_news or now - self._drawn >= _IDLE:
            self._has_news, self._drawn = False, now
            self._live.refresh()

    def close(self) -> None:
        self.tick()
        self._live.stop()

    def _prints_line(self, event: events.Event) -> bool:
        if isinstance(event, events.TaskCompleted):
            return len(self._progress.dag) <= _MANY
        if is_detail(event):
            return self._verbose and bool(event_line(event))
        return event.informs or isinstance(
            event,
            events.TaskFailed
            | events.TaskRetried
            | events.TaskInterrupted
            | events.TaskWaiting
            | events.TaskAnswered
            | events.TasksAdded
            | events.StoreDegraded
            | events.StoreAwaited
            | events.StoreRecovered
            | events.RunResumed
            | events.RunCancelling,
        )

    def _draw(self) -> Group:
        below = list(self._idle_lines())
        running = list(self._progress.running.items())
        room = max(self._console.height - _OTHER_LINES - len(below), 1)
        if len(running) > room:
            below.insert(0, _text(f"  and {len(running) - room} more", "dim"))
        return Group(Text(""), self._header(), *self._running_lines(running[:room]), *below)

    def _idle_lines(self) -> Iterator[Text]:
        """Yield lines about tasks that are not running."""
        progress = self._progress
        now = progress.clock()
        for tuned in progress.tuning.in_force:
            yield _text(f"  ‖ {as_line(event_sentence(tuned))}", "yellow")
        for throttled in progress.throttled.values():
            yield _text(f"  ‖ {as_line(throttling(throttled, time.time()))}", "yellow")
        for task_id, until in list(progress.retries.items())[:_MOST_WAITING]:
            yield _text(f"  ↻ {as_line(task_id)} tries again in {seconds(max(until - now, 0))}", "yellow")
        for task_id, question in list(progress.questions.items())[:_MOST_WAITING]:
            yield _text(f"  ? {as_line(task_id)}  {as_line(question)}", "magenta")
        for task_id, reason in progress.waiting_tasks(_MOST_WAITING, time.time()):
            yield _text(f"  · {as_line(task_id)}  {as_line(reason.text)}", "dim")

    def _header(self) -> Text:
        progress = self._progress
        of = progress.counts
        total = of.total()
        done = sum(of[status] for status in TASK_DONE)
        full = _BAR * done // total
        line = _text("", "")
        line.append(f"{self._title}  ", style="bold")
        line.append("━" * full, style="red" if of[TaskStatus.FAILED] else "green")
        line.append("━" * (_BAR - full), style="bright_black")
        line.append(f" {done}/{total}")
        counts = [f"{of[status]} {status.value.replace('_', ' ')}" for status in _COUNTED if of[status]]
        usage = progress.usage
        parts = [*counts, tokens(usage, " tokens"), cost(usage)]
        parts.append(seconds(progress.clock() - progress.began))
        line.append("  " + " · ".join(part for part in parts if part))
        if progress.degraded is not None:
            line.append("  the store does not answer", style="red")
        return line

    def _running_lines(self, running: Sequence[tuple[str, RunningAttempt]]) -> Iterator[Text]:
        """Yield a line for each running task: name, time, backend, usage, and the current action."""
        if not running:
            return
        now, held_back = self._progress.clock(), self._progress.held_back(time.time())
        for (task_id, one), (name, *facts) in zip(running, columns(_facts(*one, now) for one in running), strict=True):
            line = _text(f"  ▸ {name}", "cyan")
            line.append("".join(f"  {fact}" for fact in facts if fact), style="dim")
            room = self._console.width - line.cell_len - 2
            doing = as_line(f"waits: {one.now}" if one.kind == "waiting" else one.now)
            kind = one.kind
            if task_id in held_back:
                doing, kind = as_line(held_back[task_id]), "waiting"
            if doing and room > 8:
                fitting = last_cells(doing, room) if kind == "text" else doing
                line.append(f"  {fitting}", style=_STYLES.get(kind, ""))
            yield line


def _facts(task_id: str, one: RunningAttempt, now: float) -> tuple[str, ...]:
    return (
        as_line(task_id, _LONGEST_NAME),
        seconds(now - one.since),
        as_line(one.backend, _LONGEST_NAME) + (f" attempt {one.attempt}" if one.attempt > 1 else ""),
        tokens(one.usage),
        "" if one.usage.cost_usd is None else cost(one.usage),
    )


def _text(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")


def _line_style(event: events.Event) -> str:
    match event:
        case events.TaskCompleted():
            return COLOURS[TaskStatus.COMPLETED]
        case events.TaskFailed():
            return COLOURS[event.status]
        case events.StoreDegraded():
            return "red"
        case _:
            return "yellow"
