"""What people read of a run, as plain text: a sentence for each kind of event, units, and the remedy of each failure.

A terminal escapes the text, a page shows it as it is. The sentences are made from values by name, so that a live event
and a stored one, with what the log knows of its attempt, give the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, TypeAlias

from plait import events
from plait.clock_and_ids import parse_time
from plait.errors import ErrorKind
from plait.json_form import as_json, from_json
from plait.runner.domain.asked_question import answers_of
from plait.runner.domain.run_result import RunResult
from plait.runner.domain.wait_reasons import MOST_NAMED, clock_time, folder_wait
from plait.runner.engine.checkpointer import NOT_STORED
from plait.runner.recovery.resume_plan import DECLARED_FAILED
from plait.safe_text import shorten
from plait.usage import Usage, cost, dollars

Facts: TypeAlias = "Mapping[str, Any]"
"""The values of an event by name, those of its usage among them; also `ids` of added tasks, and the `answer` to a
question with its source, `by`.
"""
_LONGEST = 300
_DAYS_FROM = 48  # hours
_NAMES_TIME_FROM = 60.0
"""Seconds of a pause from which the time of its end is shown as well."""
_LARGE = frozenset({"tasks", "messages", "turn", "settings", "state_json", "data_json", "answers"})


def sentence(kind: str, facts: Facts) -> str:
    """Return what an event of the kind says, in one line, without its time and its task; empty if it has no line."""
    made = SENTENCES.get(kind)
    return "" if made is None else " ".join(made(facts).split())


def event_sentence(event: events.Event) -> str:
    """Return what a live event says, as `sentence` does."""
    return sentence(event.kind, _facts(event))


def is_detail(event: events.Event) -> bool:
    """Return whether only a verbose display prints a line for the event: what a running attempt does."""
    if isinstance(event, events.TaskStarted):
        return False
    return isinstance(event, events.TaskEvent) and (event.informs or not event.stored)


def event_line(event: events.Event) -> str:
    """Return what the event says, with its task; empty for events that only a live display shows."""
    line = event_sentence(event)
    return f"{event.task_id} {line}" if line and isinstance(event, events.TaskEvent) else line


def _facts(event: events.Event) -> Facts:
    facts: dict[str, Any] = as_json(event, _LARGE - ({"tasks"} if isinstance(event, events.HostAway) else set()))
    facts.update(facts.pop("usage", {}))
    if isinstance(event, events.RunCreated | events.TasksAdded):
        facts.update(tasks=len(event.tasks), ids=[one.task_id for one in event.tasks])
    elif isinstance(event, events.TaskAnswered):
        for one in answers_of(event.answers)[-1:]:
            facts.update(by=one.by, answer=one.text)
    return facts


def _run(text: str) -> Callable[[Facts], str]:
    return lambda facts: f"run {facts['run_id']} {text}"


def _started(facts: Facts) -> str:
    parts = [str(facts.get("backend", ""))]
    if facts.get("moved_from"):
        parts.append(f"in place of {facts['moved_from']}")
    if (facts.get("attempt") or 1) > 1:
        parts.append(f"attempt {facts['attempt']}")
    if facts.get("confirmed"):
        parts.append("continues its conversation")
    return f"({', '.join(parts)})"


def _ended(word: str) -> Callable[[Facts], str]:
    return lambda facts: " ".join(filter(None, (word, _spent(facts), _error(facts))))


def _retried(facts: Facts) -> str:
    how = "continues" if facts.get("continues_session") else "tries again"
    spent = f" ({spent})" if (spent := _spent(facts)) else ""
    return f"{how} in {seconds(facts.get('delay_s', 0.0))}: {_error(facts)}{spent}"


def _interrupted(facts: Facts) -> str:
    again = f", starts again in {seconds(facts['delay_s'])}" if facts.get("delay_s") else ""
    return f"interrupted: {short(facts.get('reason', ''))}{again}"


def _answered(facts: Facts) -> str:
    by = facts.get("by")
    return f"answered by {by}{_behind(facts.get('answer', ''))}" if by else "is to run again"


def _added(facts: Facts) -> str:
    by = f" by {facts['added_by']}" if facts.get("added_by") else ""
    return f"{counted(facts.get('tasks', 0), 'task')} added{by}{_behind(', '.join(facts.get('ids', ())))}"


def _output(facts: Facts) -> str:
    if facts["output"] == "text":  # a live display shows it as it grows
        return ""
    return ("waits: " if facts["output"] == "waiting" else "") + short(facts["text"])


def _throttled(facts: Facts) -> str:
    return throttling(_made(events.BackendThrottled, facts), parse_time(facts["at"]))


def _made(kind: Any, facts: Facts) -> Any:
    return from_json(kind, {one.name: facts[one.name] for one in fields(kind)})


def _host(facts: Facts) -> str:
    one: events.HostAway = _made(events.HostAway, facts)
    if one.since is None:
        return f"no task waits for {one.host} any longer: {one.reason}" if one.reason else f"{one.host} is back"
    since = f"{datetime.fromisoformat(one.since).astimezone():%H:%M:%S}"
    verb = "wait" if one.tasks[1:] else "waits"
    return f"{one.host} away since {since} ({one.reason}); {named_tasks(one.tasks)} {verb}"


SENTENCES: Mapping[str, Callable[[Facts], str]] = {
    events.RunCreated.kind: lambda facts: f"run {facts['run_id']} created, {counted(facts['tasks'], 'task')}",
    events.RunStarted.kind: _run("started"),
    events.RunResumed.kind: lambda facts: (
        f"run {facts['run_id']} resumed, {counted(facts['reused'], 'task')} completed before"
    ),
    events.RunCancelling.kind: _run("is being cancelled; no further task starts"),
    events.RunWatched.kind: lambda facts: (
        f"run {facts['run_id']} is owned by {facts['owner']}; "
        f"watching for {seconds(facts['seconds'])} whether the owner is alive"
    ),
    events.RunCompleted.kind: _run("completed"),
    events.RunFailed.kind: _run("failed"),
    events.RunCancelled.kind: _run("cancelled"),
    events.RunInterrupted.kind: _run("interrupted"),
    events.RunWaitingInput.kind: _run("waiting input"),
    events.RunParked.kind: lambda facts: (
        f"run {facts['run_id']} parked until {clock_time(parse_time(facts['until']), parse_time(facts['at']))}"
    ),
    events.TasksAdded.kind: _added,
    events.PolicyDecided.kind: lambda _: "",  # the tasks that it adds and cancels have lines
    events.BudgetRaised.kind: lambda facts: (
        f"the {f'max_cost of {only}' if (only := facts.get('only')) else 'budget'} is now {dollars(facts['usd'])}"
    ),
    events.RunTuned.kind: lambda facts: tuned(facts.get("backend"), facts.get("paused"), facts.get("slots")),
    events.BackendThrottled.kind: _throttled,
    events.HostAway.kind: _host,
    events.TaskStarted.kind: lambda facts: f"started {_started(facts)}",
    events.TaskAdopted.kind: lambda facts: (
        f"is taken over {_started(facts)}: the agent has outlived the process that started it"
    ),
    events.TaskPlaced.kind: lambda facts: f"runs on {facts['place']}",
    events.SessionOpened.kind: lambda facts: f"session {facts.get('session_id', '')}",
    events.FolderAwaited.kind: lambda facts: folder_wait(facts["folder"], facts.get("by")),
    events.NodeStarted.kind: lambda facts: f"node {facts['node']}",
    events.TaskOutput.kind: _output,
    events.TaskCompleted.kind: _ended("completed"),
    events.TaskFailed.kind: _ended("failed"),
    events.TaskSkipped.kind: _ended("skipped"),
    events.TaskCancelled.kind: _ended("cancelled"),
    events.TaskRetried.kind: _retried,
    events.TaskInterrupted.kind: _interrupted,
    events.TaskWaiting.kind: lambda facts: f"waits for a person{_behind(facts.get('question', ''))}",
    events.TaskAnswered.kind: _answered,
    events.TaskReopened.kind: lambda _: "is to run again",
    events.StoreDegraded.kind: lambda facts: f"the store failed, continuing without a store: {short(facts['error'])}",
    events.StoreAwaited.kind: lambda facts: (
        f"the run has ended; waiting up to {seconds(facts['seconds'])} for the store to take the last "
        f"{counted(facts['changes'], 'change')}; Ctrl-C ends the wait"
    ),
    events.StoreRecovered.kind: lambda facts: (
        f"the store answers again, {counted(facts['changes'], 'change')} caught up"
    ),
    events.EventsDropped.kind: lambda facts: f"{counted(facts['count'], 'output')} left out for a slow reader",
}
"""What each kind of event says. The kinds that are missing are never told."""


def _error(facts: Facts) -> str:
    return failure(facts.get("error_kind"), short(facts.get("error") or ""))


def failure(error_kind: str | None, error: str | None) -> str:
    """Return the kind of an error with its message; empty without an error."""
    return ": ".join(filter(None, (error_kind, error)))


def _spent(facts: Facts) -> str:
    """Return duration, tokens and cost: `1.2s 310+42 tokens $0.0123`."""
    used = Usage(facts.get("input_tokens", 0), facts.get("output_tokens", 0))
    paid = dollars(facts.get("cost_usd"))
    if facts.get("cost_is_partial"):
        paid = f"at least {paid}" if paid else "cost unknown"
    return " ".join(filter(None, (seconds(facts.get("duration_s")), tokens(used, " tokens"), paid)))


def _behind(text: str) -> str:
    return f": {short(text)}" if text else ""


def short(text: str) -> str:
    """Return the text in one line, cut to the length that a line has room for."""
    return shorten(" ".join(text.split()), _LONGEST)


def store_failures(result: RunResult) -> Iterator[str]:
    """Yield a line for each time during which the store failed."""
    for one in result.degraded:
        until = f"until {one.until}" if one.until else "to the end"
        lost = f": {counted(one.lost, 'change')} not stored" if one.lost else ""
        yield f"  store     it failed from {one.since} {until}{lost}: {short(one.error)}"


def named_tasks(tasks: Sequence[str]) -> str:
    """Return the first of the task ids, and the number of the others: `a, b, c and 4 more`."""
    names = ", ".join(tasks[:MOST_NAMED])
    return f"{names} and {len(tasks) - MOST_NAMED:,} more" if len(tasks) > MOST_NAMED else names


def tuned(backend: str | None, paused: bool | None, slots: int | None) -> str:
    """Return what a person has changed in a run: `api is paused; calls under way continue`."""
    if slots is not None:
        return f"at most {counted(slots, 'task')} at once{'' if backend is None else f' on {backend}'}"
    return f"{backend or 'the run'} {'is paused; calls under way continue' if paused else 'is no longer paused'}"


def throttling(throttled: events.BackendThrottled, now: float) -> str:
    """Return the throttling of a backend at Unix time `now`: `api paused 1.2s after 429; 4 of 8 slots`."""
    name, after = throttled.backend, f" after {throttled.cause}" if throttled.cause else ""
    slots = f"{throttled.slots} of {throttled.total} slots"
    left = 0.0 if throttled.until is None else parse_time(throttled.until) - now
    if throttled.cause == events.USD_PER_DAY and throttled.until is not None:
        return f"{name} has spent its usd_per_day, until {clock_time(parse_time(throttled.until), now)}"
    if left > 0 and throttled.until is not None:
        end = f", until {clock_time(parse_time(throttled.until), now)}" if left >= _NAMES_TIME_FROM else ""
        fewer = f"; {slots}" if throttled.slots < throttled.total else ""
        return f"{name} paused {seconds(left)}{after}{end}{fewer}"
    if not throttled.slots:
        return f"{name} has no credit left, and is not called until a person has answered"
    if throttled.cause == events.OWN_LIMITS:
        return f"{name} has reached its own rate limits; further tasks start as the limits allow"
    if throttled.slots < throttled.total:
        return f"{name} continues{after}; {slots}"
    return f"{name} has all its {throttled.total} slots again"


def seconds(value: float | None) -> str:
    """Format a duration: `0.03s`, `1.2s`, `2m05s`, `3h07m`, `6d05h`; empty for None."""
    if value is None:
        return ""
    if value < 59.95:
        return f"{value:.2f}s" if value < 0.1 else f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours = minutes // 60
    if hours >= _DAYS_FROM:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{hours}h{minutes % 60:02d}m"


def age(value: float) -> str:
    """Format seconds in one unit, rounded down: `5s`, `3m`, `2h`, `4d`."""
    for limit, size, unit in ((60, 1, "s"), (3600, 60, "m"), (48 * 3600, 3600, "h")):
        if value < limit:
            return f"{max(int(value // size), 0)}{unit}"
    return f"{int(value // 86400)}d"


def tokens(used: Usage, unit: str = "") -> str:
    """Format tokens in and out, with the unit behind: `310+42`; empty if both are 0."""
    return f"{used.input_tokens:,}+{used.output_tokens:,}{unit}" if used.input_tokens or used.output_tokens else ""


def spent_cells(used: Usage) -> tuple[str, str]:
    """Return tokens and cost as two cells of a table: `310+42` and `$0.0123`, `at least $0.0123` or `unknown`."""
    return tokens(used), cost(used).removeprefix("cost ")


def size(value: int) -> str:
    """Format bytes in a readable unit: `512 B`, `3.4 kB`, `12 MB`."""
    if value < 1000:
        return f"{value} B"
    shown = float(value)
    for unit in ("kB", "MB", "GB", "TB"):
        shown /= 1000
        if shown < 999.5 or unit == "TB":
            break
    return f"{shown:.1f} {unit}" if shown < 10 else f"{shown:,.0f} {unit}"


def counted(number: int, word: str) -> str:
    """Format a number with its noun: `1 task`, `2 tasks`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


_LATER = "The cause is usually gone after a while: retry the failed tasks."
REMEDIES: Mapping[str, str] = {
    ErrorKind.TRANSIENT: _LATER,
    ErrorKind.RATE_LIMITED: _LATER,
    ErrorKind.OVERLOADED: _LATER,
    ErrorKind.CHECK_FAILED: "Read the output of the check, change prompt or check, then retry the failed tasks.",
    ErrorKind.COMMAND_FAILED: "Read the output of the command, fix what it reports, then retry the failed tasks.",
    ErrorKind.CHILD_FAILED: "Look at the task that the message names; a retry of the failed tasks continues it.",
    ErrorKind.LOOP_EXHAUSTED: "Look at the last round. A run of a plan with more rounds takes these over with --like.",
    ErrorKind.CRASHED: "Read the message of the process, then retry the failed tasks.",
    ErrorKind.AUTH: "Check the key, the login and the credit, then retry the failed tasks.",
    ErrorKind.NO_CREDIT: "Top up the account, then retry the failed tasks.",
    ErrorKind.INVALID_REQUEST: "A retry sends the same request again: change the plan or the options of the backend.",
    ErrorKind.CONTEXT_OVERFLOW: "Shorten the prompt or the upstream results, or take another model.",
    ErrorKind.TRUNCATED: "Raise the limit of the answer (`max_tokens` of the backend), then retry the failed tasks.",
    ErrorKind.LIMIT_REACHED: "Raise `max_turns` or `max_budget_usd` of the backend, then retry the failed tasks.",
    ErrorKind.REFUSED: "Change the prompt, or take another model.",
    ErrorKind.TIMEOUT: "Raise the `timeout` of the task, then retry the failed tasks.",
    ErrorKind.SESSION_LOST: "Retry the failed tasks: the retry begins a new conversation.",
    ErrorKind.INVALID_OUTPUT: "Simplify the prompt or the schema, or take another model, then retry the failed tasks.",
    ErrorKind.UNAVAILABLE: "Install or set what the message names, then retry the failed tasks.",
    ErrorKind.UNEXPECTED: "Correct the code that the message or the traceback names, then retry the failed tasks.",
    NOT_STORED: "Fix the database, or shorten the result, as the message says, then retry the failed tasks.",
    DECLARED_FAILED: "Retry the failed tasks to run the task again.",
}
"""For each kind of error, the next step."""


def remedy(error_kind: str | None) -> str | None:
    """Return the next step after an error of the kind; None without an error, and for an unknown kind."""
    return None if error_kind is None else REMEDIES.get(error_kind)
