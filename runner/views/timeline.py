"""`Timeline`: the attempts and the waits of the tasks of a run as bars, read anew while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.domain.asked_question import parse_time
from plait.runner.domain.wait_reasons import WaitKind, stored_limits, waits_for
from plait.runner.views.past_waits import Bar, PastAttempt, PastWait, PastWaits
from plait.runner.views.read_views import TaskInfo
from plait.statuses import TASK_DONE, TaskStatus

_ONE_ATTEMPT = {TaskStatus.RUNNING, TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.SKIPPED}
_FEW = 200
"""Tasks whose attempts are read one by one. Beyond, all attempts of the run are read at once."""
_WAITING = {TaskStatus.PENDING, TaskStatus.WAITING_INPUT}


class Timeline:
    """The bars of the run `run_id`. Call `begin`, then `read` with the tasks, then `bars_of` for each task."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._past = PastWaits(store, run_id)
        self._tries: dict[str, tuple[object, list[PastAttempt]]] = {}
        """The attempts by task, each list with the state of the task for which it was read."""
        self._ends: dict[str, float] = {}
        """The Unix time at which each ended task ended, by id."""
        self._backends: dict[str, str | None] = {}
        """The backend of each task, by id; None for the default."""
        self._default = ""
        self._begun = 0.0
        """The Unix time of the first start of the run."""

    async def begin(self, run: RunRecord) -> None:
        """Read what is stored of the waits of the run. Raises StoreError."""
        self._begun = parse_time(run.started_at or run.created_at)
        self._default = self._default or stored_limits(json.loads(run.settings)).default
        await self._past.read(run.last_seq)

    async def read(self, infos: Mapping[str, TaskInfo]) -> None:
        """Take the tasks up, and read the attempts of those whose own times do not tell them. Raises StoreError."""
        for name, info in infos.items():
            self._backends[name] = info.backend or self._backends.get(str(info.spec.get("continues")))
            if info.status in TASK_DONE and info.ended_at is not None:
                self._ends[name] = parse_time(info.ended_at)
            else:
                self._ends.pop(name, None)
        states: dict[str, object] = {
            name: (info.attempts, info.status, info.crashes) for name, info in infos.items() if _has_tries(info)
        }
        news = {name for name, state in states.items() if self._tries.get(name, (None,))[0] != state}
        found: dict[str, list[PastAttempt]] = {name: [] for name in news}
        for only in news if len(news) <= _FEW else (None,):
            for one in await self._store.list_attempts(self._run_id, only):
                if one.task_id in found:
                    found[one.task_id].append(self._past.attempt(one))
                    if not self._past.has_read(one):
                        states[one.task_id] = None  # read again the next time
        for name, tries in found.items():
            self._tries[name] = states[name], tries

    def bars_of(self, task: TaskInfo, now: float) -> Iterator[Bar]:
        """Yield the bars of the task at Unix time `now`. A bar that goes on has no end, and no text if the reason for
        which the task waits says the same.
        """
        ends = inf if task.status in _WAITING else self._ends.get(task.task_id) if task.started_at is None else None
        backend = self._backends[task.task_id] or self._default
        for bar in self._past.bars(self._first_wait(task), self._begun, self._attempts(task), backend, ends):
            if bar.end is None or bar.end <= now:
                yield bar
            elif bar.start <= now:
                said = task.waits is not None and bar.kind == WaitKind.UPSTREAM
                yield Bar(bar.kind, bar.start, None, "" if said else bar.text)

    def _attempts(self, task: TaskInfo) -> Sequence[PastAttempt]:
        if _has_tries(task):
            return self._tries[task.task_id][1]
        if task.started_at is None:
            return ()
        end = None if task.status is TaskStatus.RUNNING else self._ends.get(task.task_id)
        return [PastAttempt(task.status, parse_time(task.started_at), end)]

    def _first_wait(self, task: TaskInfo) -> PastWait:
        """Return the wait for the dependencies, and for the task that adds the task to the run."""
        needed = task.depends_on if task.added_by is None else (*task.depends_on, task.added_by)
        ends = {one: self._ends.get(one, inf) for one in needed}
        is_blocked = task.waits is not None and task.waits.kind is WaitKind.BLOCKED
        until = inf if is_blocked else max(ends.values(), default=0.0)
        longest = sorted(ends, key=lambda one: -ends[one])
        return PastWait(WaitKind.UPSTREAM, until, waits_for(longest).text if needed else "")


def _has_tries(task: TaskInfo) -> bool:
    """Return whether the attempts of the task differ from a single one with the times and the status of the task."""
    alone = task.attempts == 1 and not task.crashes and not task.answers and task.status in _ONE_ATTEMPT
    return task.attempts > 0 and not alone


def bar_json(bar: Bar, created: float) -> list[Any]:
    """Return the bar as a list, with times in milliseconds since `created`: a browser holds a small integer in little
    memory.
    """
    start, end = (None if at is None else round((at - created) * 1000) for at in (bar.start, bar.end))
    values: list[Any] = [bar.kind, start, end]
    return [*values, bar.text] if bar.text else values
