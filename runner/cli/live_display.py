"""Live display of a run on a terminal: progress, one line for each running task, and waiting tasks with their reasons.
Lines about ended tasks scroll above the display.

No text is parsed as markup: each piece is a `rich.text.Text` of text that `visible` has cleaned.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from plait import events
from plait.runner.cli.terminal_output import COLOURS, as_line, columns, last_cells
from plait.runner.domain.dag import DAG
from plait.runner.domain.wait_reasons import NO_LIMITS, Limits, WaitingRun, WaitReason, Waits, stored_limits
from plait.runner.state.stored_run import grow
from plait.runner.views.event_sentences import event_line, event_sentence, is_detail, seconds, throttling, tokens
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.usage import NO_USAGE, Usage, cost

_Billed = events.TaskCompleted | events.TaskRetried | events.TaskFailed | events.TaskWaiting
_LONGEST = 400  # characters of the output of a task that are kept
_MANY = 100  # tasks; in larger runs completed tasks get no line
_BAR = 24
_MOST_WAITING = 4
_OTHER_LINES = 4  # the header, a blank line, "and n more", and a line for the cursor
_LONGEST_NAME = 30
_IDLE = 1.0  # seconds between two pictures while only the times change
_STYLES = {"waiting": "yellow", "notice": "yellow"}
_COUNTED = (TaskStatus.RUNNING, TaskStatus.WAITING_INPUT, TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.CANCELLED)


@dataclass(slots=True)
class RunningAttempt:
    """An attempt that is running."""

    since: float
    """Start of the attempt, on the clock of the display."""
    backend: str
    attempt: int
    now: str = ""
    """The current tool or wait; the end of the text while an answer is written."""
    kind: str = "text"
    """Kind of output that `now` holds."""
    usage: Usage = NO_USAGE
    """Tokens and cost up to now."""

    def handle(self, event: events.TaskEvent) -> None:
        """Keep what the event says as the current action."""
        if not isinstance(event, events.TaskOutput):
            self.now, self.kind = event_sentence(event)[:_LONGEST], event.kind
            return
        if event.output != "text":
            self.now = event.text[:_LONGEST]
        else:
            written = self.now if self.kind == "text" else ""
            self.now = (written + event.text[-_LONGEST:])[-_LONGEST:]
        self.kind = event.output
        if event.usage != NO_USAGE:
            self.usage = event.usage


class Progress:
    """The state of a run. `handle` takes each event; `statuses` are those of the tasks before the first event."""

    def __init__(
        self,
        dag: DAG,
        clock: Callable[[], float],
        statuses: Mapping[str, TaskStatus] | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.dag = dag.copy()
        self.clock = clock
        self.began = clock()
        self.statuses = dict(statuses or {task.id: TaskStatus.PENDING for task in dag})
        self.counts = Counter(self.statuses.values())
        self.running: dict[str, RunningAttempt] = {}
        self.retries: dict[str, float] = {}
        """Tasks that wait for another attempt, with the time of the attempt."""
        self.questions: dict[str, str] = {}
        """Questions of the tasks that wait for a person."""
        self.throttled: dict[str, events.BackendThrottled] = {}
        """The last event of each throttled backend."""
        self.away: dict[str, events.HostAway] = {}
        """The last event of each host that tasks wait for."""
        self.limits = limits
        """The limits of the run; those of a new run come with its first event."""
        self._rated: set[str] = set()
        """The backends at whose own limits of rate tasks have waited."""
        self._used: Usage = NO_USAGE
        self.ran = 0
        self.degraded: str | None = None

    @property
    def usage(self) -> Usage:
        """Usage of all attempts of this process, running attempts included as far as they report usage."""
        return sum((one.usage for one in self.running.values()), self._used)

    @property
    def done(self) -> int:
        """Number of tasks that have ended, in whatever status."""
        return sum(self.counts[status] for status in TASK_DONE)

    def handle(self, event: events.Event) -> None:
        """Update the state from the event."""
        if isinstance(event, events.TaskStarted):
            self.retries.pop(event.task_id, None)
            self.running[event.task_id] = RunningAttempt(self.clock(), event.backend, event.attempt)
            self._set_status(event.task_id, TaskStatus.RUNNING)
        elif isinstance(event, events.TaskEvent) and is_detail(event):
            if (underway := self.running.get(event.task_id)) and not isinstance(event, events.SessionOpened):
                underway.handle(event)
        elif isinstance(event, events.TaskEvent):
            self._apply_task_event(event)
        elif isinstance(event, events.TasksAdded):
            grow(self.dag, event)
            self.statuses.update({task.task_id: TaskStatus.PENDING for task in event.tasks})
            self.counts[TaskStatus.PENDING] += len(event.tasks)
        else:
            self._apply_run_event(event)

    def _apply_run_event(self, event: events.Event) -> None:
        if isinstance(event, events.BackendThrottled):
            self.throttled[event.backend] = event
            if event.cause == events.OWN_LIMITS:
                self._rated.add(event.backend)
            if event.until is None and event.slots == event.total:
                del self.throttled[event.backend]
        elif isinstance(event, events.HostAway):
            self.away[event.host] = event
            if event.since is None:
                del self.away[event.host]
        elif isinstance(event, events.RunCreated):
            self.limits = stored_limits(json.loads(event.settings))
        elif isinstance(event, events.StoreDegraded):
            self.degraded = event.error
        elif isinstance(event, events.StoreRecovered):
            self.degraded = None

    def _apply_task_event(self, event: events.TaskEvent) -> None:
        underway = self.running.pop(event.task_id, None)
        if isinstance(event, _Billed):
            self._used += event.usage
        elif underway is not None:
            self._used += underway.usage
        self.questions.pop(event.task_id, None)
        if isinstance(event, events.TaskCompleted):
            self.ran += 1
            self._set_status(event.task_id, TaskStatus.COMPLETED)
        elif isinstance(event, events.TaskFailed):
            self._set_status(event.task_id, event.status)
        elif isinstance(event, events.TaskCancelled):
            self._set_status(event.task_id, TaskStatus.CANCELLED)
        elif isinstance(event, events.TaskWaiting):
            self.questions[event.task_id] = event.question
            self._set_status(event.task_id, TaskStatus.WAITING_INPUT)
        else:
            if isinstance(event, events.TaskRetried) or (isinstance(event, events.TaskInterrupted) and event.delay_s):
                self.retries[event.task_id] = self.clock() + event.delay_s
            self._set_status(event.task_id, TaskStatus.PENDING)

    def _set_status(self, task_id: str, status: TaskStatus) -> None:
        self.counts[self.statuses[task_id]] -= 1
        self.statuses[task_id] = status
        self.counts[status] += 1

    def held_back(self, now: float) -> Mapping[str, str]:
        """Return the reason at Unix time `now` of each running task that waits for a host, by id."""
        if not self.away:
            return {}
        waits = self._waits(now)
        return {one: reason.text for one in self.running if (reason := waits.reason(one)) is not None}

    def _waits(self, now: float) -> Waits:
        run = WaitingRun(
            RunStatus.RUNNING, self.dag, self.statuses, self.limits, self.throttled, self._rated, away=self.away
        )
        return Waits(run, now)

    def waiting_tasks(self, limit: int, now: float) -> list[tuple[str, WaitReason]]:
        """Return the first `limit` tasks that have to start, each with the reason at Unix time `now`. Tasks that wait
        for a retry are left out.
        """
        waits = self._waits(now)
        pending = (task.id for task in self.dag if self.statuses[task.id] is TaskStatus.PENDING)
        reasons = ((one, waits.reason(one)) for one in pending if one not in self.retries)
        return list(islice(((one, reason) for one, reason in reasons if reason is not None), limit))


class LiveDisplay:
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
        self._progress.handle(event)
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
        total = len(progress.dag)
        full = _BAR * progress.done // total
        line = _text("", "")
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
