"""The one loop of a run: workers that take tasks from the schedule, run attempts, and hand on what happened.

A worker goes on with the next task itself, so a chain of tasks is one worker and a run never holds more workers than
places. What a completion unlocks is started in the same transaction: its events are submitted together, the worker
waits for one commit, and only then calls the next backend. State, schedule and submission change in one step without
an await, so cancellation finds them in agreement at every await.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anyio
import anyio.abc

from backends.errors import BackendError
from backends.protocol import Backend, Message, Opening, Output, Reply
from backends.text import clean_text
from backends.values import value
from runner import events
from runner.attempt import Outcome, attempt, classified
from runner.checkpoint import Sink
from runner.clock import Clock, stamper
from runner.feed import Feed
from runner.log import logger
from runner.result import TaskResult
from runner.retrying import deserves_retry, retry_delay
from runner.schedule import Schedule
from runner.state import Past, RunState
from runner.status import TASK_DONE, RunStatus, TaskStatus
from runner.task import FailureMode, Task


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an execution works with. `names` gives each task's backend, by position, as a key of `backends`."""

    run_id: str
    backends: Mapping[str, Backend]
    names: Sequence[str]
    sink: Sink
    feed: Feed
    clock: Clock
    rng: random.Random


@value
class _Start:
    """A task that is recorded as running and whose backend is called next."""

    position: int
    session_id: str | None


@dataclass(slots=True)
class _Idle:
    """A worker that waits to be handed a task."""

    wake: anyio.Event
    next: _Start | None = None


class Execution:
    """Runs what is left of a run in this process, until nothing can start any more or somebody ends it."""

    def __init__(self, state: RunState, schedule: Schedule, around: Surroundings) -> None:
        self._state = state
        self._tasks = state.dag.tasks
        self._schedule = schedule
        self._around = around
        self._stamp = stamper(around.clock)
        self._log = logger(run=around.run_id)
        self._workers: anyio.abc.TaskGroup | None = None
        self._idle: list[_Idle] = []
        self.ended_by: Literal["stop", "cancel"] | None = None
        """Who ended the run before its time: `stop` leaves it to be resumed, `cancel` is for good."""

    async def run(self) -> None:
        """Work until nothing is left, or until `end`. Cancellation ends all attempts and then propagates."""
        async with anyio.create_task_group() as workers:
            self._workers = workers
            if self.ended_by is not None:
                return
            await self._start(*self._take())

    def end(self, how: Literal["stop", "cancel"]) -> None:
        """Start nothing more and end the attempts that are under way. Safe to call at any time and more than once."""
        if self.ended_by is None:
            self.ended_by = how
        if self._workers is not None:
            self._workers.cancel_scope.cancel()

    def leave(self) -> list[events.Event]:
        """Settle what was under way when the workers ended; the events to be submitted, the run's last one included."""
        at = self._stamp()
        happened: list[events.Event] = []
        if self._schedule.exhausted:
            self.ended_by = None  # it came too late: everything that could run had run
        for position, status in enumerate(self._state.statuses):
            task_id, number = self._tasks[position].id, self._state.attempts[position]
            if self.ended_by == "cancel" and status not in TASK_DONE:
                self._state.settle(position, TaskResult(task_id, TaskStatus.CANCELLED, attempts=number))
                happened.append(events.TaskCancelled(at, task_id, number))
            elif status is TaskStatus.RUNNING:
                self._state.statuses[position] = TaskStatus.PENDING
                happened.append(events.TaskInterrupted(at, task_id, number, "the run was stopped"))
        happened.append(self._end(at))
        return happened

    def _end(self, at: str) -> events.RunEnded:
        run_id = self._around.run_id
        if self.ended_by == "cancel":
            return events.RunCancelled(at, run_id, RunStatus.CANCELLED)
        failed = [r.id for r in self._state.results.values() if r.status is TaskStatus.FAILED]
        if not self._schedule.exhausted:
            return events.RunInterrupted(at, run_id, RunStatus.INTERRUPTED)
        if failed:
            blocked = sum(status not in TASK_DONE for status in self._state.statuses)
            error = f"{len(failed)} failed ({', '.join(failed[:5])}{', ...' if len(failed) > 5 else ''})"
            return events.RunFailed(at, run_id, RunStatus.FAILED, error + (f", {blocked} blocked" if blocked else ""))
        return events.RunCompleted(at, run_id, RunStatus.COMPLETED)

    def _take(self) -> tuple[list[_Start], list[events.Event]]:
        """Give out every free place: the starts, and the events that say so."""
        starts: list[_Start] = []
        happened: list[events.Event] = []
        while self.ended_by is None and (position := self._schedule.take()) is not None:
            self._state.statuses[position] = TaskStatus.RUNNING
            self._state.attempts[position] += 1
            started = self._started(position)
            starts.append(_Start(position, started.session_id))
            happened.append(started)
        return starts, happened

    def _started(self, position: int) -> events.TaskStarted:
        task, name = self._tasks[position], self._around.names[position]
        past = self._state.past(task)
        session_id = self._new_session_id(name) if past is None else past.session_id
        return events.TaskStarted(self._stamp(), task.id, self._state.attempts[position], name, session_id)

    def _new_session_id(self, name: str) -> str | None:
        try:
            session_id = self._around.backends[name].new_session_id()
        except Exception as error:
            self._log.warning("no_session_id", backend=name, error=type(error).__name__)
            return None
        return clean_text(session_id) if isinstance(session_id, str) else None

    async def _start(self, starts: list[_Start], happened: list[events.Event]) -> None:
        """Make starts durable, then hand each to a worker."""
        if starts:
            await self._around.sink.commit(happened)
            self._hand_out(starts)

    def _hand_out(self, starts: list[_Start]) -> None:
        """Wake an idle worker for each start, or make a new one: waking costs a fifth of making."""
        assert self._workers is not None
        for start in starts:
            if self._idle:
                idle = self._idle.pop()
                idle.next = start
                idle.wake.set()
            else:
                self._workers.start_soon(self._work, start)

    async def _work(self, start: _Start | None) -> None:
        while start is not None:
            began = self._around.clock.monotonic()
            prompt, outcome = await self._attempt(start)
            ended = self._settled(start.position, prompt, outcome, self._around.clock.monotonic() - began)
            starts, happened = self._take()
            await self._around.sink.commit([ended, *happened])
            if starts:
                start = starts.pop()
                self._hand_out(starts)
            else:
                start = await self._next_start()

    async def _next_start(self) -> _Start | None:
        """Wait to be handed a task; None when the run has come to its end."""
        if self._schedule.exhausted:
            for idle in self._idle:
                idle.wake.set()
            return None
        waiting = _Idle(anyio.Event())
        self._idle.append(waiting)
        await waiting.wake.wait()
        return waiting.next

    async def _attempt(self, start: _Start) -> tuple[str, Outcome]:
        position, task = start.position, self._tasks[start.position]
        try:
            prompt = self._state.prompt(task)
        except Exception as error:
            return "", Outcome(None, None, classified(error))
        past = self._state.past(task) or Past()
        opening = Opening(
            session_id=start.session_id,
            resume=past.session_id is not None,
            history=past.messages,
            output_schema=task.output_schema,
            idempotency_key=f"{self._around.run_id}:{task.id}",
            metadata=task.metadata,
            on_output=partial(self._output, position),
            on_session=partial(self._session, position),
        )
        return prompt, await attempt(self._around.backends[self._around.names[position]], opening, prompt, task.timeout)

    def _output(self, position: int, output: Output) -> None:
        task_id, number = self._tasks[position].id, self._state.attempts[position]
        self._around.feed.publish(events.TaskOutput(self._stamp(), task_id, number, output.kind, output.text))

    def _session(self, position: int, session_id: str) -> None:
        task_id, number = self._tasks[position].id, self._state.attempts[position]
        self._around.sink.submit([events.SessionOpened(self._stamp(), task_id, number, clean_text(session_id))])

    def _settled(self, position: int, prompt: str, outcome: Outcome, duration: float) -> events.Event:
        """Bring state and schedule up to date with an attempt's outcome; the event that tells of it."""
        if outcome.reply is not None:
            return self._completed(position, prompt, outcome, duration)
        assert outcome.error is not None
        task, error = self._tasks[position], outcome.error
        self._state.failures[position] += 1
        if deserves_retry(task.retry, self._state.failures[position], error):
            return self._retrying(position, error, duration)
        return self._failed(position, error, duration)

    def _completed(self, position: int, prompt: str, outcome: Outcome, duration: float) -> events.TaskCompleted:
        reply = outcome.reply
        assert reply is not None
        task, number = self._tasks[position], self._state.attempts[position]
        messages = reply.messages or (Message("user", prompt), Message("assistant", reply.text, reply.usage))
        self._state.settle(
            position,
            TaskResult(
                task.id,
                TaskStatus.COMPLETED,
                reply.text,
                reply.data,
                attempts=number,
                usage=reply.usage,
                duration_s=duration,
                session_id=reply.session_id,
            ),
        )
        if position in self._state.continued:
            self._remember(position, task, reply, messages)
        self._schedule.finish(position, TaskStatus.COMPLETED)
        return events.TaskCompleted(
            self._stamp(),
            task.id,
            number,
            reply.text,
            reply.data,
            outcome.data_json,
            reply.usage,
            duration,
            reply.session_id,
            messages,
        )

    def _remember(self, position: int, task: Task, reply: Reply, messages: tuple[Message, ...]) -> None:
        before = self._state.past(task) or Past()
        self._state.conversations[position] = Past(reply.session_id, (*before.messages, *messages))

    def _retrying(self, position: int, error: BackendError, duration: float) -> events.TaskRetrying:
        task = self._tasks[position]
        delay = retry_delay(task.retry, self._state.failures[position], error.retry_after, self._around.rng)
        self._state.statuses[position] = TaskStatus.PENDING
        self._schedule.set_aside(position)
        assert self._workers is not None
        self._workers.start_soon(self._try_again, position, delay)
        self._log.info("task_retrying", task=task.id, error_kind=error.kind.value, delay_s=round(delay, 3))
        number = self._state.attempts[position]
        return events.TaskRetrying(self._stamp(), task.id, number, error.kind.value, error.message, delay, duration)

    async def _try_again(self, position: int, delay: float) -> None:
        await self._around.clock.sleep(delay)
        self._schedule.requeue(position)
        await self._start(*self._take())

    def _failed(self, position: int, error: BackendError, duration: float) -> events.TaskFailed:
        task, number = self._tasks[position], self._state.attempts[position]
        status = TaskStatus.SKIPPED if task.failure_mode is FailureMode.SKIP else TaskStatus.FAILED
        result = TaskResult(
            task.id,
            status,
            error_kind=error.kind.value,
            error=error.message,
            attempts=number,
            duration_s=duration,
        )
        self._state.settle(position, result)
        self._schedule.finish(position, status)
        self._log.info("task_failed", task=task.id, error_kind=error.kind.value, status=status.value)
        return events.TaskFailed(self._stamp(), task.id, number, status, error.kind.value, error.message, duration)
