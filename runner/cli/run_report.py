"""A live run in this process as a person follows it: its tasks at work, what tasks wait for, what they used; and what
is printed of it: a line for each event, and at its end the result, the summary, open questions, and commands to
continue.

A display reads `Progress`, and so does the summary at the end.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from plait import events
from plait.backends.extras import install_command
from plait.backends.prices import list_version
from plait.clock_and_ids import parse_time
from plait.json_form import JsonValue, to_json
from plait.persistence.store_records import RunRecord
from plait.runner.cli.command_line import CANCELLED, COMPLETED, FAILED, PARKED, STORE, WAITING
from plait.runner.cli.terminal_output import (
    as_line,
    coloured,
    command_line,
    output,
    print_json,
    print_line,
    print_note,
    visible,
    without_controls,
    write,
)
from plait.runner.domain.asked_question import Way
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_result import RunResult, TaskResult
from plait.runner.domain.run_tuning import Tuning
from plait.runner.domain.wait_reasons import (
    NO_LIMITS,
    Limits,
    WaitReason,
    Waits,
    clock_time,
    stored_limits,
)
from plait.runner.engine.lease import Liveness, liveness
from plait.runner.engine.run_options import LEASE_SECONDS, StorePlace
from plait.runner.policies.goal_policy import Loop
from plait.runner.state.run_state import RunState
from plait.runner.views.event_sentences import (
    age,
    counted,
    event_line,
    event_sentence,
    failure,
    is_detail,
    named_tasks,
    seconds,
    store_failures,
    tokens,
)
from plait.runner.views.view_models import LoopView, QuestionView, usage_fields, view_of
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, Usage, cost, lacks_price, token_parts

_Billed = events.TaskCompleted | events.TaskRetried | events.TaskFailed | events.TaskWaiting
_LONGEST = 400  # characters of the output of a task that are kept
_MOST_FAILURES = 10
_MOST_MODELS = 3
_MOST_QUESTIONS = 5
STATUS_CODES = {
    RunStatus.COMPLETED: COMPLETED,
    RunStatus.FAILED: FAILED,
    RunStatus.WAITING_INPUT: WAITING,
    RunStatus.PARKED: PARKED,
}


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
    """A run for a display and for the summary at the end: the state of its tasks, and what its events say beside it.
    `handle` takes each event.
    """

    def __init__(self, state: RunState, clock: Callable[[], float], limits: Limits = NO_LIMITS) -> None:
        self.state = state
        self.clock = clock
        self.began = clock()
        self.running: dict[str, RunningAttempt] = {}
        self.retries: dict[str, float] = {}
        """Tasks that wait for another attempt, with the time of the attempt."""
        self.throttled: dict[str, events.BackendThrottled] = {}
        """The last event of each throttled backend."""
        self.away: dict[str, events.HostAway] = {}
        """The last event of each host that tasks wait for."""
        self.tuning = Tuning()
        """What a person has changed in the run."""
        self._folders: dict[str, events.FolderAwaited] = {}
        """The last event of each task that has waited for its folder."""
        self.limits = limits
        """The limits of the run; those of a new run come with its first event."""
        self._rated: set[str] = set()
        """The backends at whose own rate limits tasks have waited."""
        self._used: Usage = NO_USAGE
        self.degraded: str | None = None
        self.started: set[str] = set()
        """The tasks that this process ran."""
        self.unpriced: set[str | None] = set()
        """The models of unknown cost in attempts, of this process, that were not the last of their tasks."""
        self.policy_state: JsonValue = None
        """The last state of the policy."""
        self.left: Mapping[str, Sequence[str]] | None = None
        """The ids of the tasks that waited for a host that was away when the run was stopped or cancelled, by host;
        None if the run ended by itself.
        """
        self.took = 0.0
        """Seconds from the start of the run to its end."""

    @property
    def usage(self) -> Usage:
        """Usage of all attempts of this process, running attempts included as far as they report usage."""
        return sum((one.usage for one in self.running.values()), self._used)

    @property
    def dag(self) -> DAG:
        """The tasks, with those that were added."""
        return self.state.dag

    @property
    def counts(self) -> Counter[TaskStatus]:
        """The number of tasks by status."""
        return self.state.counts

    @property
    def questions(self) -> Mapping[str, str]:
        """The questions of the tasks that wait for a person."""
        return {self.dag.tasks[position].id: text for position, text in self.state.questions.items()}

    def handle(self, event: events.Event) -> None:
        """Keep what the event says and the state of the tasks does not."""
        if isinstance(event, events.TaskStarted):
            self.retries.pop(event.task_id, None)
            self.running[event.task_id] = RunningAttempt(self.clock(), event.backend, event.attempt)
            if not isinstance(event, events.TaskAdopted):
                self.started.add(event.task_id)
        elif isinstance(event, events.FolderAwaited):
            self._folders[event.task_id] = event
        elif isinstance(event, events.TaskEvent) and is_detail(event):
            if (underway := self.running.get(event.task_id)) and not isinstance(event, events.SessionOpened):
                underway.handle(event)
        elif isinstance(event, events.TaskEvent):
            self._apply_task_event(event)
        else:
            self._apply_run_event(event)

    def leave(self) -> None:
        """Keep what waits for hosts that are away: from now on tasks end in this process, and wait for no host."""
        if self.left is None:
            self.left = {name: one.tasks for name, one in self.away.items()}

    def _apply_run_event(self, event: events.Event) -> None:
        if isinstance(event, events.BackendThrottled):
            self.throttled[event.backend] = event
            if event.cause == events.OWN_LIMITS:
                self._rated.add(event.backend)
            if event.until is None and event.slots == event.total:
                del self.throttled[event.backend]
        elif isinstance(event, events.RunTuned):
            self.tuning = self.tuning.after([event])
        elif isinstance(event, events.HostAway):
            self.away[event.host] = event
            if event.since is None:
                del self.away[event.host]
            elif self.left is not None:  # was found to be away just before the stop
                self.left = {**self.left, event.host: event.tasks}
        elif isinstance(event, events.RunCreated):
            self.limits = stored_limits(json.loads(event.settings))
        elif isinstance(event, events.RunCancelling):
            self.leave()
        elif isinstance(event, events.PolicyDecided):
            self.policy_state = event.state
        elif isinstance(event, events.StoreDegraded):
            self.degraded = event.error
        elif isinstance(event, events.StoreRecovered):
            self.degraded = None

    def _apply_task_event(self, event: events.TaskEvent) -> None:
        underway = self.running.pop(event.task_id, None)
        if isinstance(event, _Billed):
            self._used += event.usage
            if isinstance(event, events.TaskRetried | events.TaskWaiting) and lacks_price(event.usage):
                self.unpriced.add(event.usage.model)
        elif underway is not None:
            self._used += underway.usage
        if isinstance(event, events.TaskRetried) or (isinstance(event, events.TaskInterrupted) and event.delay_s):
            self.retries[event.task_id] = self.clock() + event.delay_s

    def held_back(self, now: float) -> Mapping[str, str]:
        """Return the reason at Unix time `now` of each running task that waits for a host, by id."""
        if not self.away:
            return {}
        waits = self._waits(now)
        return {one: reason.text for one in self.running if (reason := waits.reason(one)) is not None}

    def _waits(self, now: float) -> Waits:
        statuses = {task.id: status for task, status in zip(self.dag, self.state.statuses, strict=True)}
        asking = [position for position, one in self.state.asking.items() if one.way is Way.BUDGET]
        return Waits(
            now,
            RunStatus.RUNNING,
            self.dag,
            statuses,
            limits=self.limits,
            throttled=self.throttled,
            rated=self._rated,
            away=self.away,
            folders=self._folders,
            asks_for_budget=self.dag.tasks[asking[0]].id if asking else None,
            tuning=self.tuning,
        )

    def waiting_tasks(self, limit: int, now: float) -> list[tuple[str, WaitReason]]:
        """Return the first `limit` tasks that have to start, each with the reason at Unix time `now`. Tasks that wait
        for a retry are left out.
        """
        waits = self._waits(now)
        each = zip(self.dag, self.state.statuses, strict=True)
        pending = (task.id for task, status in each if status is TaskStatus.PENDING)
        reasons = ((one, waits.reason(one)) for one in pending if one not in self.retries)
        return list(islice(((one, reason) for one, reason in reasons if reason is not None), limit))


class Display:
    """Shows a live run on standard error: this one nothing."""

    def handle(self, event: events.Event) -> None:
        """Show an event, which `Progress` has handled."""

    def note(self, text: str) -> None:
        """Print a message of plait."""

    def tick(self) -> None:
        """Refresh the display; called several times a second."""

    def close(self) -> None:
        """Restore the terminal after the last event."""


class PlainDisplay(Display):
    """Prints a line with the local time for every event; if `verbose`, also for tools, nodes and waits of tasks."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def handle(self, event: events.Event) -> None:
        if self._verbose or not (is_detail(event) or isinstance(event, events.RunCreated)):
            line = as_line(event_line(event))
            if line:
                print_note(f"{datetime.fromisoformat(event.at).astimezone():%H:%M:%S} {line}")

    def note(self, text: str) -> None:
        print_note(text)


def exit_code(result: RunResult) -> int:
    """Return the exit code of the command for the result of a run."""
    if result.lost:
        return STORE
    return STATUS_CODES.get(result.status, CANCELLED)


def print_result(dag: DAG, result: RunResult, only: str | None = None) -> None:
    """Print the results of the final tasks, or of the task `only`, on standard output: the text, or JSON for structured
    output. Unchanged for a file, escaped for a terminal.
    """
    fit = visible if output().isatty() else without_controls
    finals = [task for one in dag.finals if (task := result[one.id]).status is TaskStatus.COMPLETED]
    finals = [task for task in finals if only is None or task.id == only]
    for task in finals:
        head = f"== {task.id} ==\n" if len(finals) > 1 else ""
        is_json = task.data is not None or dag[task.id].output_schema is not None
        text = to_json(task.data) if is_json else task.text
        print_line(head + fit(text).removesuffix("\n"))


def print_result_json(result: RunResult, progress: Progress, store: StorePlace | None) -> None:
    """Print the whole result as one JSON object on standard output."""
    print_json(
        {
            "run_id": result.run_id,
            "status": result.status.value,
            "error": result.error,
            "due_at": result.due_at,
            "reused": result.reused,
            "ran": len(progress.started),
            "adopted": result.resume_summary.adopted if result.resume_summary else 0,
            "possibly_billed_twice": result.resume_summary.repeated if result.resume_summary else 0,
            "duration_s": round(progress.took, 3),
            **usage_fields(result.usage),
            "store": None if store is None else str(store),
            "degraded": [asdict(one) for one in result.degraded],
            "policy_state": progress.policy_state,
            "tasks": [_task_json(task) for task in result.tasks.values()],
            **({"left_out": result.left_out} if result.left_out else {}),
        }
    )


_BEFORE_USAGE = ("text", "data", "error_kind", "error", "attempts")
_BEHIND_USAGE = ("duration_s", "session_id", "reused", "question")


def _task_json(task: TaskResult) -> dict[str, Any]:
    before, behind = ({name: getattr(task, name) for name in names} for names in (_BEFORE_USAGE, _BEHIND_USAGE))
    first = {"task_id": task.id, "status": task.status.value, **before, "model": task.usage.model}
    return {**first, **usage_fields(task.usage), **behind}


def print_summary(
    result: RunResult, progress: Progress, store: StorePlace | None, waiting: Sequence[QuestionView] = ()
) -> None:
    """Print the summary and the next commands on standard error. `store` is None if nothing was stored; `waiting` lists
    the waiting tasks as stored.
    """
    status = coloured(result.status.value, result.status, sys.stderr)
    write(sys.stderr, f"\n{status} in {seconds(progress.took)}: {', '.join(_summary_parts(result))}\n")
    questions = _questions(result, store, waiting)
    parts = token_parts(result.usage)
    problems = (*_failures(result), *([f"  tokens    {parts}"] if parts else []), *_unknown_costs(result, progress))
    left = [unreached_line(host, tasks) for host, tasks in (progress.left or {}).items()]
    parked = [f"  parked    {_end_of_wait(result)}"] if result.status is RunStatus.PARKED else []
    for line in (*_goal(progress.policy_state), *problems, *questions, *parked, *left, *store_failures(result)):
        print_note(line)
    if store is not None:
        for what, line in _next_commands(progress.dag, result, store):
            print_note(f"  {what:<9} {line}")


def unreached_line(host: str, tasks: Sequence[str]) -> str:
    """Return the line for a host on which tasks may still be under way after the end of the run here."""
    return f"  away      {as_line(host)} cannot be reached; {named_tasks(tasks)} may still be under way there"


def print_failure(result: RunResult, store: StorePlace | None) -> None:
    """Print the one line with which a quiet run reports its end, with the command by which a run in `store` goes on."""
    why = _end_of_wait(result) if result.status is RunStatus.PARKED else result.error
    line = f"plait: run {result.run_id} is {result.status.value}" + (f": {why}" if why else "")
    if store is not None and (words := words_to_continue(result.status, result.run_id)):
        line += f"; next: {command_line(store, *words)}"
    print_note(line)


def words_to_continue(status: RunStatus, run_id: str) -> tuple[str, ...]:
    """Return the words of the command by which a run with this status goes on; none for any other status."""
    words = {
        RunStatus.INTERRUPTED: ("resume", run_id),
        RunStatus.WAITING_INPUT: ("answer", run_id),
        RunStatus.PARKED: ("wake",),
    }
    return words.get(status, ())


def _end_of_wait(result: RunResult) -> str:
    """Return until when a parked run waits, in words."""
    now = time.time()
    due = now if result.due_at is None else parse_time(result.due_at)
    return f"everything waits until {clock_time(due, now)}, in {age(due - now)}" if due > now else "due at once"


def _summary_parts(result: RunResult) -> Iterator[str]:
    counts = Counter(task.status for task in result.tasks.values()) + Counter(result.left_out)
    yield f"{counts[TaskStatus.COMPLETED]:,} of {counted(counts.total(), 'task')} completed"
    if receipt := result.resume_summary:
        adopted = f"adopted {receipt.adopted:,}, " if receipt.adopted else ""
        yield f"reused {receipt.reused:,}, {adopted}ran {receipt.ran:,}, possibly billed twice {receipt.repeated:,}"
    for status in (TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.CANCELLED):
        if counts[status]:
            yield f"{counts[status]:,} {status.value}"
    if result.waiting:
        yield f"{len(result.waiting):,} waiting for a person"
    if result.blocked:
        yield f"{len(result.blocked):,} blocked"
    usage = result.usage
    yield from filter(None, (tokens(usage, " tokens"), cost(usage)))


def _goal(policy_state: JsonValue) -> Iterator[str]:
    """Yield how far an orchestrator came, and why it stopped, from the last state of the run's policy."""
    if policy_state is not None and (loop := Loop.found_in(policy_state)) is not None:
        shown = view_of(LoopView, loop, ended_by=loop.ended_by)
        yield f"  goal      {shown.description}"
        if (why := shown.why_stopped) is not None:
            yield f"  stopped   {why}"


def _failures(result: RunResult) -> Iterator[str]:
    failed = [result[task_id] for task_id in result.failed]
    if result.status is RunStatus.FAILED and not failed and result.error:
        yield f"  failed    {as_line(result.error, 300)}"
    for task in failed[:_MOST_FAILURES]:
        tries = f" ({counted(task.attempts, 'attempt')})" if task.attempts > 1 else ""
        yield f"  failed    {task.id}: {as_line(failure(task.error_kind, task.error), 300)}{tries}"
    if len(failed) > _MOST_FAILURES:
        yield f"  failed    and {len(failed) - _MOST_FAILURES} more"


def _unknown_costs(result: RunResult, progress: Progress) -> Iterator[str]:
    """Yield the line that names the models without a price."""
    used = [task.usage for task in result.tasks.values()]
    last = {one.model for one in used if lacks_price(one)}
    models = sorted(model for model in last | progress.unpriced if model)
    if models:
        shown = ", ".join(as_line(model, 60) for model in models[:_MOST_MODELS])
        more = f" and {len(models) - _MOST_MODELS} more" if len(models) > _MOST_MODELS else ""
        remedy = "add the price to `prices:` in the plan"
        remedy += "" if list_version() else f", or install the list of prices: {install_command('prices')}"
        yield f"  cost      unknown for model {shown}{more}; {remedy}"


def _questions(result: RunResult, store: StorePlace | None, waiting: Sequence[QuestionView]) -> Iterator[str]:
    questions = {one.task_id: one for one in waiting}
    for task_id in result.waiting[:_MOST_QUESTIONS]:
        yield f"  waiting   {task_id}: {as_line(result[task_id].question or '', 300)}"
        if store is not None and task_id in questions:
            yield from (f"  {what:<9} {text}" for what, text in question_facts(questions[task_id], store))
    if len(result.waiting) > _MOST_QUESTIONS:
        yield f"  waiting   and {len(result.waiting) - _MOST_QUESTIONS} more"


def _next_commands(dag: DAG, result: RunResult, store: StorePlace) -> Iterator[tuple[str, str]]:
    run_id = result.run_id
    yield "show", command_line(store, "show", run_id)
    if dag.rows_file is not None:
        yield "results", command_line(store, "export", run_id, "--to", "results.csv")
    if result.waiting:
        yield "questions", command_line(store, "answer", run_id)
    if result.status is RunStatus.PARKED:
        yield "wake", f"{command_line(store, 'wake')} continues it then; --install says how to let a timer call it"
    elif result.status in {RunStatus.INTERRUPTED, RunStatus.WAITING_INPUT}:
        yield "resume", command_line(store, "resume", run_id)
    elif result.failed:
        yield "resume", command_line(store, "resume", run_id, "--retry-failed")
    talk = None if result.lost else _continuable_task(dag, result)
    if talk is not None:
        yield "continue", command_line(store, "continue", run_id, talk, "Now in five words.")


def _continuable_task(dag: DAG, result: RunResult) -> str | None:
    """Return the last completed task with a session, final tasks first; None without sessions."""
    finals = [result[task.id] for task in dag.finals]
    for tasks in (finals, list(result.tasks.values())):
        for task in reversed(tasks):
            if task.status is TaskStatus.COMPLETED and task.session_id is not None:
                return task.id
    return None


def print_watch_notice(run: RunRecord) -> None:
    """Print why the command takes half a minute, if the owner of the run cannot be judged from this machine."""
    owner = run.owner
    if owner is not None and liveness(owner) is Liveness.UNKNOWN:
        print_note(
            f"{as_line(owner.process)} owns run {run.run_id} and cannot be checked from this "
            f"machine; waiting up to {LEASE_SECONDS:g} s for a renewal of the lease"
        )


_LONGEST_VALUE = 120


def answering_command(one: QuestionView, path: StorePlace) -> str:
    """Return the command that answers, with a placeholder for the answer."""
    if one.asks is None:
        return command_line(path, "answer", one.run_id, one.task_id, "--done", "TEXT")
    schema = one.asks.schema
    wanted = "TEXT" if schema is None else "JSON" if schema else "VALUE"
    return command_line(path, "answer", one.run_id, one.task_id, wanted)


def question_facts(one: QuestionView, path: StorePlace) -> Iterator[tuple[str, str]]:
    """Yield what a person needs to answer, each fact with its name: the last is the command."""
    if (asks := one.asks) is not None:
        if asks.schema is not None:
            yield "wants", as_line(_describe_schema(asks.schema), _LONGEST_VALUE)
        if asks.default is not None:
            yield "default", as_line(_dump(asks.default), _LONGEST_VALUE)
        if asks.deadline_at is not None:
            left = parse_time(asks.deadline_at) - time.time()
            then = "fails the task" if asks.default is None else "takes the default"
            when = f"in {age(left)}" if left > 0 else f"passed: `plait resume` {then}"
            yield "deadline", f"{asks.deadline_at}, {when}"
    yield "answer", answering_command(one, path)


def _describe_schema(schema: Mapping[str, JsonValue]) -> str:
    """Describe the values that a JSON Schema allows, in a few words."""
    allowed, kind, fields = schema.get("enum"), schema.get("type"), schema.get("properties")
    if isinstance(allowed, list) and allowed:
        return "one of " + ", ".join(map(_dump, allowed))
    if kind == "object" and isinstance(fields, dict) and fields:
        return f"an object with {', '.join(fields)}"
    if kind == "array" and isinstance(items := schema.get("items"), dict):
        return f"a list, each {_describe_schema(items)}"
    if isinstance(kind, str) and schema.keys() <= {"type", "title", "description"}:
        return kind
    return "JSON that matches " + _dump(dict(schema)) if schema else "any JSON, or text"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
