"""A live run in this process as a person follows it: its tasks at work, what tasks wait for, what they used.

A display reads `Progress`, and so does the summary at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from plait import events
from plait.json_form import JsonValue
from plait.runner.domain.asked_question import Way
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_tuning import Tuning
from plait.runner.domain.wait_reasons import NO_LIMITS, Limits, WaitingRun, WaitReason, Waits, stored_limits
from plait.runner.state.run_state import RunState
from plait.runner.views.event_sentences import event_sentence, is_detail
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, Usage, lacks_price

_Billed = events.TaskCompleted | events.TaskRetried | events.TaskFailed | events.TaskWaiting
_LONGEST = 400  # characters of the output of a task that are kept


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
        """The backends at whose own limits of rate tasks have waited."""
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
        run = WaitingRun(
            RunStatus.RUNNING,
            self.dag,
            statuses,
            self.limits,
            self.throttled,
            self._rated,
            away=self.away,
            folders=self._folders,
            asks_for_budget=self.dag.tasks[asking[0]].id if asking else None,
            tuning=self.tuning,
        )
        return Waits(run, now)

    def waiting_tasks(self, limit: int, now: float) -> list[tuple[str, WaitReason]]:
        """Return the first `limit` tasks that have to start, each with the reason at Unix time `now`. Tasks that wait
        for a retry are left out.
        """
        waits = self._waits(now)
        each = zip(self.dag, self.state.statuses, strict=True)
        pending = (task.id for task, status in each if status is TaskStatus.PENDING)
        reasons = ((one, waits.reason(one)) for one in pending if one not in self.retries)
        return list(islice(((one, reason) for one, reason in reasons if reason is not None), limit))
