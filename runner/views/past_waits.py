"""`PastWaits`: the attempts of a task and the waits before and between them, from what is stored of its run.

Before its first attempt a task waits for its dependencies, then for a slot. After an attempt it waits for its retry or
for a person, then for a slot. A wait for a slot while the backend is throttled is a wait for the backend.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any, Final, NamedTuple

from plait.events import (
    TASK_RESULTS,
    BackendThrottled,
    RunResumed,
    TaskAnswered,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskWaiting,
)
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord, EventRecord
from plait.runner.domain.asked_question import parse_time
from plait.runner.domain.wait_reasons import WaitKind, clock_time
from plait.runner.state.run_state import THROTTLING
from plait.statuses import AttemptStatus

_KINDS: Final = (
    TaskRetried.kind,
    TaskInterrupted.kind,
    TaskWaiting.kind,
    TaskAnswered.kind,
    TaskReopened.kind,
    BackendThrottled.kind,
    RunResumed.kind,
)
_RESULTS: Final = frozenset(kind.removeprefix("task_") for kind in TASK_RESULTS)


class Bar(NamedTuple):
    """An attempt or a wait, as a timeline shows it."""

    kind: str
    """An AttemptStatus, or the WaitKind upstream, slot, throttled, retry or question."""
    start: float
    """Unix time."""
    end: float | None = None
    """Unix time; None while under way."""
    text: str = ""
    """The reason of a wait in words, if there is more to it than its kind."""


class PastWait(NamedTuple):
    """A wait for something other than a slot. A wait for a slot follows."""

    kind: WaitKind
    """upstream, retry, throttled or question; ended for the time until a person let an ended task run again."""
    until: float
    """Unix time of the end; infinite as long as the wait has no end."""
    text: str = ""
    """As in `Bar`."""


class PastAttempt(NamedTuple):
    """An attempt, with the wait that follows."""

    status: str
    start: float
    end: float | None = None
    wait: PastWait | None = None


@dataclass(slots=True)
class _Throttled:
    """A time in which a backend was paused, or ran fewer tasks at once. The end is infinite while it is open."""

    since: float
    until: float


class PastWaits:
    """The waits of the run `run_id`, up to the last `read`."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._after = 0
        self._retries: dict[tuple[str, int], tuple[WaitKind, float]] = {}
        """The kind and the end of the wait for the next attempt, by task and attempt."""
        self._asked: set[tuple[str, int]] = set()
        """The attempts that ended with a question."""
        self._released: dict[str, list[float]] = {}
        """The times at which a person let the task go on, by task."""
        self._throttled: dict[str, list[_Throttled]] = {}
        """The times of each throttled backend, in order."""

    async def read(self, last_seq: int) -> None:
        """Read the events up to the number `last_seq`. Raises StoreError."""
        events = [event for kind in _KINDS for event in await self._events(kind, last_seq)]
        for event in sorted(events, key=attrgetter("seq")):
            self._take(event)
        self._after = last_seq

    def attempt(self, record: AttemptRecord) -> PastAttempt:
        """Return the attempt that `record` describes."""
        start, end = parse_time(record.started_at), None if record.ended_at is None else parse_time(record.ended_at)
        return PastAttempt(record.status, start, end, None if end is None else self._wait_after(record, end))

    def has_read(self, record: AttemptRecord) -> bool:
        """Return whether the wait after the attempt is known; false for an attempt that has ended since the `read`."""
        return record.status != AttemptStatus.RETRIED or (record.task_id, record.attempt) in self._retries

    def bars(
        self, first: PastWait, begun: float, attempts: Sequence[PastAttempt], backend: str, ends: float | None
    ) -> Iterator[Bar]:
        """Yield the attempts of a task on `backend`, and its waits from the start of the run, `begun`. `first` is the
        wait before the first attempt. `ends` is the end of the wait after the last attempt: infinite for a task that
        still waits, None for a task that does not.
        """
        since, wait = begun, first
        for attempt in attempts:
            yield from self._waits(wait, since, attempt.start, backend)
            yield Bar(attempt.status, attempt.start, attempt.end)
            since, wait = attempt.end or inf, attempt.wait or PastWait(WaitKind.SLOT, 0.0)
        if ends is not None:
            yield from self._waits(wait, since, ends, backend)

    def _waits(self, wait: PastWait, since: float, end: float, backend: str) -> Iterator[Bar]:
        turn = max(since, min(wait.until, end))
        if since < turn and wait.kind is not WaitKind.ENDED:
            yield Bar(wait.kind, since, turn, wait.text)
        throttled = self._throttled.get(backend, [])
        for n in range(bisect_right(throttled, turn, key=attrgetter("until")), len(throttled)):
            start, until = max(throttled[n].since, turn), min(throttled[n].until, end)
            if start >= end:
                break
            if turn < start:
                yield Bar(WaitKind.SLOT, turn, start)
            yield Bar(WaitKind.THROTTLED, start, until, "" if until == inf else _throttled_until(until, start))
            turn = until
        if turn < end:
            yield Bar(WaitKind.SLOT, turn, end)

    def _wait_after(self, record: AttemptRecord, ended: float) -> PastWait | None:
        name = record.task_id, record.attempt
        if name in self._retries:
            kind, until = self._retries[name]
            is_retry = kind is WaitKind.RETRY
            text = f"retry at {clock_time(until, ended)}" if is_retry else _throttled_until(until, ended)
            return PastWait(kind, until, text)
        until = next((at for at in self._released.get(record.task_id, ()) if at >= ended), inf)
        if name in self._asked:
            return PastWait(WaitKind.QUESTION, until)
        return PastWait(WaitKind.ENDED, until) if record.status in _RESULTS else None

    async def _events(self, kind: str, last_seq: int) -> Sequence[EventRecord]:
        events: list[EventRecord] = []
        after = self._after
        while after < last_seq and (page := await self._store.list_events(self._run_id, after, kind=kind)):
            events += page
            after = page[-1].seq
        return [event for event in events if event.seq <= last_seq]

    def _take(self, event: EventRecord) -> None:
        at, detail, name = parse_time(event.at), json.loads(event.detail), (event.task_id or "", event.attempt or 0)
        match event.kind:
            case RunResumed.kind:  # the new process calls its backends with all slots
                for backend in self._throttled:
                    self._throttle(backend, at, at)
            case BackendThrottled.kind:
                self._throttle(detail["backend"], at, _end_of_throttling(at, detail))
            case TaskRetried.kind:
                kind = WaitKind.THROTTLED if detail["error_kind"] in THROTTLING else WaitKind.RETRY
                self._retries[name] = kind, at + detail["delay_s"]
            case TaskInterrupted.kind:
                if "delay_s" in detail:
                    self._retries[name] = WaitKind.RETRY, at + detail["delay_s"]
            case TaskWaiting.kind:
                self._asked.add(name)
            case _:
                self._released.setdefault(name[0], []).append(at)

    def _throttle(self, backend: str, at: float, until: float) -> None:
        """Let the backend be throttled from `at` until `until`, whatever was reported before of the time after `at`."""
        times = self._throttled.setdefault(backend, [])
        if times and times[-1].until > at:
            times[-1].until = until
        elif until > at:
            times.append(_Throttled(at, until))


def _end_of_throttling(at: float, detail: Mapping[str, Any]) -> float:
    if detail["slots"] < detail["total"]:
        return inf  # until a later event
    return at if detail["until"] is None else parse_time(detail["until"])


def _throttled_until(when: float, since: float) -> str:
    return f"throttled until {clock_time(when, since)}"
