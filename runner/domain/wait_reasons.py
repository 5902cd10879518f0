"""`Waits`: the reason for which a task is not running, from the state of its run. Pure: the time is an argument.

The state comes from a store or from the events of a live run, so that `plait show`, the live display, `plait log`, HTTP
and Python give the same reason in the same words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from plait.clock_and_ids import iso, parse_time
from plait.events import USD_PER_DAY, BackendThrottled, FolderAwaited, HostAway
from plait.json_form import value
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_tuning import Tuning
from plait.statuses import RUN_DONE, TASK_DONE, RunStatus, TaskStatus
from plait.task import may_start, satisfies

MOST_NAMED = 3
"""Tasks that a reason names."""


class WaitKind(StrEnum):
    """The kind of a reason for which a task is not running."""

    UPSTREAM = "upstream"
    """The task needs other tasks, which are not done."""
    BLOCKED = "blocked"
    """A task that this task needs has failed, was cancelled, or is blocked itself."""
    SLOT = "slot"
    """All slots, or all slots of the task's backend, are in use."""
    PAUSED = "paused"
    """A person has paused the run, or the task's backend."""
    THROTTLED = "throttled"
    """The task's backend is paused, or runs fewer tasks at once, after a rate limit or an overload."""
    RATE = "rate"
    """The task's backend has reached its own rate limits."""
    HOST = "host"
    """The attempt of the task needs a host that is away."""
    FOLDER = "folder"
    """The task writes in a folder in which another one writes."""
    RETRY = "retry"
    """The last attempt failed, or its process died, and the next attempt starts at `until`."""
    CREDIT = "credit"
    """The account of the task's backend has no credit left, and a task of the run asks a person to top it up."""
    BUDGET = "budget"
    """The task costs money, and a task of the run asks for a higher budget; or the account of its backend has spent its
    money of the day.
    """
    QUESTION = "question"
    """A person has to answer a question, or to decide about an interrupted task."""
    OWNER_DEAD = "owner_dead"
    """The process that ran the run has died; a resume continues the run."""
    NO_PROCESS = "no_process"
    """No process runs the run at present: it is queued, or waits to be resumed after an answer."""
    CANCELLING = "cancelling"
    """The run is being cancelled: no further task starts."""
    ENDED = "ended"
    """The run has ended before the task could start."""


@value
class WaitReason:
    """The reason for which a task is not running."""

    kind: WaitKind
    """The kind of the reason."""
    text: str
    """The reason in a few words, for people: `waits for a, b`. Times are local."""
    tasks: tuple[str, ...] = ()
    """The first tasks that this task waits for, at most 3; see `count`."""
    count: int = 0
    """The number of tasks that this task waits for."""
    backend: str | None = None
    """The backend of the task, where the backend is the reason."""
    until: str | None = None
    """The end of the wait as far as known, UTC in ISO 8601."""

    def own_text(self, now: float) -> str:
        """Return the reason at Unix time `now`, in a few words; empty for that of the whole run, and for a question."""
        if self.kind is WaitKind.OWNER_DEAD:
            return "" if self.until is None else f"retry at {clock_time(parse_time(self.until), now)}"
        return "" if self.kind is WaitKind.QUESTION else self.text


@value
class Limits:
    """The limits of a run, as far as known."""

    default: str = "default"
    """The backend of the tasks that name none."""
    total: int | None = None
    """The number of tasks that run at once."""
    backends: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of tasks that run at once on a backend."""
    spares: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """The backends that take over from a backend, in order."""


NO_LIMITS = Limits()


def stored_limits(settings: Mapping[str, Any]) -> Limits:
    """Return the limits in the settings of a run."""
    slots = settings.get("slots", {})
    total = settings.get("concurrency")
    return Limits(
        slots.get("default", NO_LIMITS.default),
        total if isinstance(total, int) else None,
        slots.get("limits", {}),
        slots.get("spares", {}),
    )


@dataclass
class Waits:
    """The reasons for which the tasks of a run do not run, from its state at Unix time `now`."""

    now: float
    status: RunStatus
    """The shown status: interrupted or parked without a live owner."""
    dag: DAG
    statuses: Mapping[str, TaskStatus]
    """The status of each task, by id."""
    limits: Limits = NO_LIMITS
    throttled: Mapping[str, BackendThrottled] = field(default_factory=dict[str, BackendThrottled])
    """The last event of each throttled backend, by name."""
    rated: Collection[str] = ()
    """The backends at whose own rate limits tasks have waited."""
    retries: Mapping[str, float] = field(default_factory=dict[str, float])
    """The Unix time of the next attempt of each task that waits for one, by id."""
    deadlines: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """The deadline of each open question of a task, by id. A waiting task without an entry was interrupted by a crash,
    and a person decides.
    """
    owner: str = ""
    """The owner, for display."""
    away: Mapping[str, HostAway] = field(default_factory=dict[str, HostAway])
    """The last event of each host that tasks wait for, by name."""
    asks_for_budget: str | None = None
    """The task that asks for a higher budget of the run, if any."""
    tuning: Tuning = field(default_factory=Tuning)
    """What a person has changed in the run."""
    folders: Mapping[str, FolderAwaited] = field(default_factory=dict[str, FolderAwaited])
    """The last event of each task that has waited for its folder, by id."""

    def __post_init__(self) -> None:
        running = [task for task in self.dag if self.statuses[task.id] is TaskStatus.RUNNING]
        self._running = len(running)
        self._on = Counter(self._backend(task.id) for task in running)
        self._blocked = self._find_blocked()

    def reason(self, task_id: str) -> WaitReason | None:
        """Return the reason for which the task is not running; None for a task that runs or has ended.

        A task whose attempt waits for a host that is away has a reason, too, although its status is running.
        """
        status = self.statuses[task_id]
        if status is TaskStatus.WAITING_INPUT:
            return self._question(task_id)
        if status is not TaskStatus.PENDING and status is not TaskStatus.RUNNING:
            return None
        if self.status is RunStatus.INTERRUPTED and status is TaskStatus.RUNNING:
            return self._owner_dead()
        if status is TaskStatus.RUNNING:
            return self._away(task_id)
        return self._pending(task_id)

    def _away(self, task_id: str) -> WaitReason | None:
        """Return the reason of a running task; None if the attempt does not wait for a host."""
        hosts = [host for host in self.away.values() if task_id in host.tasks and host.since is not None]
        if not hosts:
            return None
        since = min(parse_time(host.since) for host in hosts if host.since is not None)
        named = ", ".join(host.host for host in hosts[:MOST_NAMED])
        more = f" and {len(hosts) - MOST_NAMED:,} more" if len(hosts) > MOST_NAMED else ""
        return WaitReason(WaitKind.HOST, f"waiting for {named}{more}, away since {clock_time(since, self.now)}")

    def _pending(self, task_id: str) -> WaitReason:
        missing = self._missing(task_id)
        if failed := [task for task in missing if task in self._blocked]:
            return _named(WaitKind.BLOCKED, "blocked by", failed)
        stopped = _STOPPED.get(self.status)
        if stopped is not None:
            return stopped
        if missing:
            return waits_for(missing)
        if self.status is RunStatus.INTERRUPTED:
            return self._owner_dead(self.retries.get(task_id))
        asker = self.asks_for_budget
        if asker is not None and (self.status is RunStatus.WAITING_INPUT or task_id not in self.retries):
            return _named(WaitKind.BUDGET, "waits for a higher budget, asked for by", [asker])
        return _NO_PROCESS.get(self.status) or self._ready(task_id)

    def _ready(self, task_id: str) -> WaitReason:
        """Return the reason of a task of a running run that needs no other task."""
        if (when := self.retries.get(task_id)) is not None:
            return WaitReason(WaitKind.RETRY, f"retry at {clock_time(when, self.now)}", until=iso(when))
        if (awaited := self.folders.get(task_id)) is not None:
            by = () if awaited.by is None else (awaited.by,)
            return WaitReason(WaitKind.FOLDER, folder_wait(awaited.folder, awaited.by), by)
        name, tuning = self._backend(task_id), self.tuning
        if (pause := tuning.pause_of(name)) is not None:
            text = f"{pause.backend or 'the run'} is paused since {clock_time(parse_time(pause.at), self.now)}"
            return WaitReason(WaitKind.PAUSED, text, backend=pause.backend)
        slots, name = tuning.slots, self._serving(name)
        running, limit = self._on[name], slots.get(name, self.limits.backends.get(name))
        throttled = self.throttled.get(name)
        if throttled is not None and not throttled.slots:
            return WaitReason(WaitKind.CREDIT, f"{name} has no credit left; a task asks to top it up", backend=name)
        if throttled is not None and (throttling := self._throttling(throttled, running)) is not None:
            return throttling
        total = slots.get(None, self.limits.total)
        if total is not None and self._running >= total:
            return WaitReason(WaitKind.SLOT, f"no free slot ({self._running} of {total})")
        if limit is not None and running >= limit:
            return WaitReason(WaitKind.SLOT, f"no free slot of {name} ({running} of {limit})", backend=name)
        if name in self.rated:
            return WaitReason(WaitKind.RATE, f"{name} has reached its own rate limits", backend=name)
        # Other runs of the process may hold the slots of a throttled backend.
        slowed = None if throttled is None else self._throttling(throttled, throttled.slots)
        return slowed or WaitReason(WaitKind.SLOT, "waits for a free slot")

    def _serving(self, name: str) -> str:
        """Return the backend that the tasks of the backend `name` call now: its own, or the first open spare."""
        spares = self.limits.spares.get(name, ())
        return next((one for one in (name, *spares) if not self._is_closed(one)), name) if spares else name

    def _is_closed(self, name: str) -> bool:
        last = self.throttled.get(name)
        if last is None or last.until is None:
            return last is not None and not last.slots
        if last.cause == USD_PER_DAY:
            return False  # spares are for the limits of servers
        until = parse_time(last.until)
        return until > self.now and until - parse_time(last.at) > _LONG_S

    def _throttling(self, throttled: BackendThrottled, running: int) -> WaitReason | None:
        name, until = throttled.backend, throttled.until
        after = f" after {throttled.cause}" if throttled.cause else ""
        limit = f"limit {throttled.slots} of {throttled.total}"
        remaining = 0.0 if until is None else parse_time(until) - self.now
        if remaining > 0 and until is not None:
            if throttled.cause == USD_PER_DAY:
                text = f"{name} has spent its usd_per_day, until {clock_time(parse_time(until), self.now)}"
                return WaitReason(WaitKind.BUDGET, text, backend=name, until=until)
            pause = f"{remaining:.1f} s" if remaining < _LONG_S else f"until {clock_time(parse_time(until), self.now)}"
            return WaitReason(WaitKind.THROTTLED, f"{name} paused {pause}{after}, {limit}", backend=name, until=until)
        if running >= throttled.slots < throttled.total:
            return WaitReason(WaitKind.THROTTLED, f"{name} slowed{after}, {limit}", backend=name)
        return None

    def _question(self, task_id: str) -> WaitReason:
        if task_id not in self.deadlines:
            return WaitReason(WaitKind.QUESTION, "asks a person whether to run again")
        return WaitReason(WaitKind.QUESTION, "asks a person", until=self.deadlines[task_id])

    def _owner_dead(self, next_try: float | None = None) -> WaitReason:
        owner = f" ({self.owner})" if self.owner else ""
        text = f"owner dead{owner}; resume the run"
        if next_try is None:
            return WaitReason(WaitKind.OWNER_DEAD, text)
        later = f"{text}; retry at {clock_time(next_try, self.now)}"
        return WaitReason(WaitKind.OWNER_DEAD, later, until=iso(next_try))

    def _backend(self, task_id: str) -> str:
        return self.dag.backend_of(self.dag[task_id]) or self.limits.default

    def _missing(self, task_id: str) -> list[str]:
        """Return the tasks that the task still needs."""
        dag = self.dag
        position = dag.position(task_id)
        if dag.join_of(position) == "all":
            needed = (dag.tasks[other].id for other in dag.needed(position) if not dag.pairs_up(position, other))
            return [name for name in needed if not satisfies(dag[name], self.statuses[name])]
        starts = self._may_start(position, self._blocked)
        names = [dag.tasks[other].id for other in dag.dependencies[position]]
        if starts is None:
            return [name for name in names if self.statuses[name] not in TASK_DONE and name not in self._blocked]
        return [] if starts else [name for name in names if name in self._blocked]

    def _may_start(self, position: int, blocked: Collection[str]) -> bool | None:
        dag, statuses = self.dag, self.statuses
        names = [dag.tasks[other].id for other in dag.dependencies[position]]
        completed = sum(statuses[name] is TaskStatus.COMPLETED for name in names)
        unended = sum(statuses[name] not in TASK_DONE and name not in blocked for name in names)
        dead = sum(name in blocked for name in names)
        return may_start(dag.join_of(position), completed=completed, unended=unended, dead=dead)

    def _find_blocked(self) -> set[str]:
        """Return the failed and cancelled tasks that others need, and the pending tasks that therefore cannot run."""
        dag, statuses = self.dag, self.statuses
        bad = [
            task_id
            for task_id in statuses
            if statuses[task_id] in _BAD and not satisfies(dag[task_id], statuses[task_id])
        ]
        blocked = set(bad)
        while bad:
            for position in dag.needed_by(dag.position(bad.pop())):
                task_id = dag.tasks[position].id
                if task_id in blocked or statuses[task_id] is not TaskStatus.PENDING:
                    continue
                if dag.join_of(position) == "all" or self._may_start(position, blocked) is False:
                    blocked.add(task_id)
                    bad.append(task_id)
        return blocked


_LONG_S = 60.0
"""Seconds of a pause from which the time of its end is named."""
_STOPPED = {
    RunStatus.CANCELLING: WaitReason(WaitKind.CANCELLING, "the run is being cancelled"),
    **{status: WaitReason(WaitKind.ENDED, f"the run is {status.value}") for status in RUN_DONE},
}
_NO_PROCESS = {
    RunStatus.QUEUED: WaitReason(WaitKind.NO_PROCESS, "queued: no process has started the run"),
    RunStatus.WAITING_INPUT: WaitReason(WaitKind.NO_PROCESS, "no process has this run; resume it"),
}
_BAD = frozenset({TaskStatus.FAILED, TaskStatus.CANCELLED})


def folder_wait(folder: str, by: str | None) -> str:
    """Return the reason of a task that waits for its folder, in which the task `by` writes, or another run."""
    return f"waits for the folder {folder}, in which {by or 'another run'} works"


def waits_for(tasks: Sequence[str]) -> WaitReason:
    """Return the reason of a task that needs `tasks`."""
    return _named(WaitKind.UPSTREAM, "waits for", tasks)


def _named(kind: WaitKind, verb: str, tasks: Sequence[str]) -> WaitReason:
    named = tuple(tasks[:MOST_NAMED])
    more = f" and {len(tasks) - MOST_NAMED:,} more" if len(tasks) > MOST_NAMED else ""
    return WaitReason(kind, f"{verb} {', '.join(named)}{more}", named, len(tasks))


def clock_time(when: float, now: float) -> str:
    """Return the time in the zone of this machine, with the day unless the day is that of `now`."""
    moment = datetime.fromtimestamp(when, UTC).astimezone()
    today = datetime.fromtimestamp(now, UTC).astimezone().date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%a %d %b %H:%M}"
