"""One line for each event of a run: for pipes, log files and simple terminals."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from plait import events
from plait.runner.cli.command_exits import print_note
from plait.runner.cli.display.waits import wait_line
from plait.runner.cli.terminal_output import as_line, counted, seconds, tokens
from plait.runner.domain.asked_question import answers_of
from plait.statuses import TaskStatus
from plait.usage import cost

_LONGEST_ERROR = 300


class Display(Protocol):
    """Shows a live run on standard error."""

    def handle(self, event: events.Event) -> None:
        """Show an event."""
        ...

    def note(self, text: str) -> None:
        """Print a message of plait."""
        ...

    def tick(self) -> None:
        """Refresh the display; called several times a second."""
        ...

    def close(self) -> None:
        """Restore the terminal after the last event."""
        ...


class NoDisplay:
    """Shows nothing."""

    def handle(self, event: events.Event) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay(NoDisplay):
    """Prints a line with the local time for every event; if `verbose`, also for tools, nodes and waits of tasks."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def handle(self, event: events.Event) -> None:
        many = events.TaskOutput | events.NodeStarted | events.TaskPlaced
        if isinstance(event, many) and not self._verbose:
            return
        line = event_line(event)
        if line:
            print_note(f"{_clock_time(event.at)} {line}")

    def note(self, text: str) -> None:
        print_note(text)


def event_line(event: events.Event) -> str:
    """Return the event as a line that is safe for a terminal; empty for events that only a live display shows."""
    if isinstance(event, events.TaskEvent):
        words = _task_words(event)
        return f"{as_line(event.task_id)} {words}" if words else ""
    line = ""
    match event:
        case events.RunStarted():
            line = f"run {as_line(event.run_id)} started"
        case events.RunResumed():
            line = f"run {as_line(event.run_id)} resumed, {counted(event.reused, 'task')} completed before"
        case events.RunCancelling():
            line = f"run {as_line(event.run_id)} is being cancelled; no further task starts"
        case events.RunWatched():
            line = f"run {as_line(event.run_id)} is owned by {as_line(event.owner)}; "
            line += f"watching for {seconds(event.seconds)} whether the owner is alive"
        case events.TasksAdded():
            by = f" by {as_line(event.added_by)}" if event.added_by is not None else ""
            ids = ", ".join(task.task_id for task in event.tasks)
            line = f"{counted(len(event.tasks), 'task')} added{by}: {_shorten(ids)}"
        case events.StoreDegraded():
            line = f"the store failed, continuing without a store: {_shorten(event.error)}"
        case events.StoreAwaited():
            line = f"the run has ended; waiting up to {seconds(event.seconds)} for the store to take the last "
            line += f"{counted(event.changes, 'change')}; Ctrl-C ends the wait"
        case events.StoreRecovered():
            line = f"the store answers again, {counted(event.changes, 'change')} caught up"
        case events.BackendThrottled() | events.HostAway():
            line = wait_line(event)
        case events.RunEnded():
            line = f"run {as_line(event.run_id)} {event.status.value}"
        case _:
            pass
    return line


def _task_words(event: events.TaskEvent) -> str:
    line = ""
    match event:
        case events.TaskStarted():
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            goes_on = ", continues its conversation" if event.confirmed else ""
            how = "is taken over" if isinstance(event, events.TaskAdopted) else "started"
            line = f"{how} ({as_line(event.backend)}{again}{goes_on})"
        case events.TaskPlaced() | events.NodeStarted() | events.TaskOutput():
            line = _report_words(event)
        case events.TaskCompleted():
            line = f"completed {duration_and_tokens(event)}"
        case events.TaskRetried():
            how = "continues" if event.continues_session else "tries again"
            line = f"{how} in {seconds(event.delay_s)}: {event.error_kind}: {_shorten(event.error)}"
        case events.TaskFailed():
            word = "skipped" if event.status is TaskStatus.SKIPPED else "failed"
            line = f"{word} {seconds(event.duration_s)} {event.error_kind}: {_shorten(event.error)}"
        case events.TaskInterrupted():
            again = f", starts again in {seconds(event.delay_s)}" if event.delay_s else ""
            line = f"interrupted: {_shorten(event.reason)}{again}"
        case events.TaskWaiting():
            line = f"waits for a person: {_shorten(event.question)}"
        case events.TaskAnswered():
            given = answers_of(event.answers)[-1:]
            line = f"answered by {given[0].by}: {_shorten(given[0].text)}" if given else "is to run again"
        case events.TaskCancelled():
            line = "cancelled"
        case events.TaskReopened():
            line = "is to run again"
        case _:
            pass
    return line


def _report_words(event: events.TaskPlaced | events.NodeStarted | events.TaskOutput) -> str:
    match event:
        case events.TaskPlaced():
            return f"runs on {as_line(event.place)}"
        case events.NodeStarted():
            return f"node {as_line(event.node)}"
        case _:
            waits = "waits: " if event.output == "waiting" else ""
            return "" if event.output == "text" else f"{waits}{_shorten(event.text)}"


def duration_and_tokens(event: events.TaskCompleted) -> str:
    """Return duration, tokens and a known cost: `1.2s 310+42 tokens $0.0123`."""
    used = tokens(event.usage.input_tokens, event.usage.output_tokens)
    paid = "" if event.usage.cost_usd is None else cost(event.usage)
    return " ".join(filter(None, (seconds(event.duration_s), f"{used} tokens" if used else "", paid)))


def _shorten(text: str) -> str:
    return as_line(text, _LONGEST_ERROR)


def _clock_time(at: str) -> str:
    return f"{datetime.fromisoformat(at).astimezone():%H:%M:%S}"
