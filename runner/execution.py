"""The one loop of a run: workers that take tasks from the schedule, run attempts, and hand on what happened.

A worker goes on with the next task itself, so a chain of tasks is one worker and a run never holds more workers than
places. What a completion unlocks is started in the same transaction: its events are submitted together, the worker
waits for one commit, and only then calls the next backend. State, schedule and submission change in one step without
an await, so cancellation finds them in agreement at every await.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.abc

from backends.errors import BackendError, ErrorKind
from backends.protocol import Message, Reply
from runner import events
from runner.attempt import Outcome
from runner.clock import stamper
from runner.log import logger
from runner.result import TaskResult
from runner.retrying import deserves_retry, retry_delay
from runner.schedule import Schedule
from runner.state import Past, RunState
from runner.status import TASK_DONE, RunStatus, TaskStatus
from runner.task import FailureMode
from runner.turn import Surroundings, Turn, Turns
from runner.verdict import at_most_once_question


@dataclass(slots=True)
class _Idle:
    """A worker that waits to be handed a task."""

    wake: anyio.Event
    next: Turn | None = None


STORE_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""How long a task marked at_most_once waits for a store that is away, before it fails."""


class Execution:
    """Runs what is left of a run in this process, until nothing can start any more or somebody ends it."""

    def __init__(self, state: RunState, schedule: Schedule, around: Surroundings) -> None:
        self._state = state
        self._tasks = state.dag.tasks
        self._schedule = schedule
        self._around = around
        self._stamp = stamper(around.clock)
        self._turns = Turns(state, around, self._stamp)
        self._log = logger(run=around.run_id)
        self._workers: anyio.abc.TaskGroup | None = None
        self._idle: list[_Idle] = []
        self._under_way: dict[int, Turn] = {}
        """The last turn of every task marked at_most_once."""
        self.ended_by: Literal["stop", "cancel"] | None = None
        """Who ended the run before its time: `stop` leaves it to be resumed, `cancel` is for good."""
        self._winding_down = False
        self._left = False
        self._calls = 0
        """How many backends are being called."""

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

    def wind_down(self) -> None:
        """Cancel the run for good, but let the attempts under way come to their end, until `end`. A run that is ending
        already goes on with that.
        """
        if self.ended_by is not None or self._left or self._is_over:
            return
        self.ended_by, self._winding_down = "cancel", True
        self._around.sink.submit([events.RunCancelling(self._stamp(), self._around.run_id)])
        self._end_when_quiet()

    @property
    def _is_over(self) -> bool:
        """Whether all that can run has run, and nobody is asked: then it is too late to cancel."""
        return self._schedule.exhausted and TaskStatus.WAITING_INPUT not in self._state.statuses

    def _end_when_quiet(self) -> None:
        if self._winding_down and not self._calls:
            self.end("cancel")

    def leave(self) -> list[events.Event]:
        """Settle what was under way when the workers ended; the events to be submitted, the run's last one included."""
        at = self._stamp()
        happened: list[events.Event] = []
        self._left = True
        if self._is_over and not self._winding_down:
            self.ended_by = None  # it came too late: everything that could run had run
        for position, status in enumerate(self._state.statuses):
            task_id, number = self._tasks[position].id, self._state.attempts[position]
            if self.ended_by == "cancel" and status not in TASK_DONE:
                self._state.settle(position, TaskResult(task_id, TaskStatus.CANCELLED, attempts=number))
                happened.append(events.TaskCancelled(at, task_id, number))
            elif status is TaskStatus.RUNNING and position in self._under_way and self._under_way[position].called:
                question = at_most_once_question(number)
                self._state.ask(position, question)
                happened.append(events.TaskWaiting(at, task_id, number, question))
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
        if TaskStatus.WAITING_INPUT in self._state.statuses:
            return events.RunWaitingInput(at, run_id, RunStatus.WAITING_INPUT)
        if failed:
            blocked = sum(status not in TASK_DONE for status in self._state.statuses)
            first = next(r for r in self._state.results.values() if r.status is TaskStatus.FAILED)
            error = f"{len(failed)} failed ({', '.join(failed[:5])}{', ...' if len(failed) > 5 else ''})"
            error += f", {blocked} blocked" if blocked else ""
            return events.RunFailed(at, run_id, RunStatus.FAILED, f"{error}; {first.id}: {first.error}")
        return events.RunCompleted(at, run_id, RunStatus.COMPLETED)

    def _take(self) -> tuple[list[Turn], list[events.Event]]:
        """Give out every free place: the turns to be had, and the events that say so."""
        turns: list[Turn] = []
        happened: list[events.Event] = []
        while self.ended_by is None and (position := self._schedule.take()) is not None:
            self._state.statuses[position] = TaskStatus.RUNNING
            self._state.attempts[position] += 1
            self._state.started.add(position)
            turn = self._turns.begin(position)
            turns.append(turn)
            if turn.task.at_most_once:
                before = self._under_way.get(position)
                turn.waits = before.waits + 1 if before is not None else 0
                self._under_way[position] = turn
            name = self._around.names[position]
            happened.append(
                events.TaskStarted(self._stamp(), turn.task.id, turn.number, name, turn.session_id, turn.confirmed)
            )
        return turns, happened

    async def _start(self, turns: list[Turn], happened: list[events.Event]) -> None:
        """Make starts durable, then hand each to a worker."""
        if turns:
            await self._around.sink.commit(happened)
            self._hand_out(turns)

    def _hand_out(self, turns: list[Turn]) -> None:
        """Wake an idle worker for each turn, or make a new one: waking costs a fifth of making."""
        assert self._workers is not None
        for turn in turns:
            if self._idle:
                idle = self._idle.pop()
                idle.next = turn
                idle.wake.set()
            else:
                self._workers.start_soon(self._work, turn)

    async def _work(self, turn: Turn | None) -> None:
        # Cancelled while the start was written down, a run calls nobody any more.
        while turn is not None and not self._winding_down:
            began = self._around.clock.monotonic()
            self._calls += 1
            outcome = await self._turns.have(turn)
            self._calls -= 1
            ended = self._settled(turn, outcome, self._around.clock.monotonic() - began)
            turns, happened = self._take()
            await self._around.sink.commit([ended, *happened])
            self._end_when_quiet()
            if turns:
                turn = turns.pop()
                self._hand_out(turns)
            else:
                turn = await self._next_turn()

    async def _next_turn(self) -> Turn | None:
        """Wait to be handed a task; None when the run has come to its end."""
        if self._schedule.exhausted:
            for idle in self._idle:
                idle.wake.set()
            return None
        waiting = _Idle(anyio.Event())
        self._idle.append(waiting)
        await waiting.wake.wait()
        return waiting.next

    def _settled(self, turn: Turn, outcome: Outcome, duration: float) -> events.Event:
        """Bring state and schedule up to date with an attempt's outcome; the event that tells of it."""
        if outcome.reply is not None:
            return self._completed(turn, outcome.reply, outcome.data_json, duration)
        assert outcome.error is not None
        if turn.goes_on and outcome.error.kind is ErrorKind.SESSION_LOST:
            return self._retrying(turn, outcome.error, duration, 0.0)  # not the task's fault: it starts over
        if turn.task.at_most_once and not turn.called and self._around.sink.away and turn.waits < len(STORE_WAITS_S):
            return self._retrying(turn, outcome.error, duration, STORE_WAITS_S[turn.waits])
        self._state.failures[turn.position] += 1
        failures = self._state.failures[turn.position]
        if not turn.task.at_most_once and deserves_retry(turn.task.retry, failures, outcome.error):
            delay = retry_delay(turn.task.retry, failures, outcome.error.retry_after, self._around.rng)
            return self._retrying(turn, outcome.error, duration, delay)
        return self._failed(turn, outcome.error, duration)

    def _completed(self, turn: Turn, reply: Reply, data_json: str | None, duration: float) -> events.TaskCompleted:
        position, task, number = turn.position, turn.task, turn.number
        messages = turn.messages(reply)
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
                session_id=turn.session_id,
            ),
        )
        if position in self._state.continued:
            before = self._state.past(task) or Past()
            self._state.conversations[position] = Past(turn.session_id, (*before.messages, *messages))
        self._schedule.finish(position, TaskStatus.COMPLETED)
        return events.TaskCompleted(
            self._stamp(),
            task.id,
            number,
            reply.text,
            reply.data,
            data_json,
            reply.usage,
            duration,
            turn.session_id,
            messages,
        )

    def _retrying(self, turn: Turn, error: BackendError, duration: float, delay: float) -> events.TaskRetrying:
        position, task, number = turn.position, turn.task, turn.number
        self._state.statuses[position] = TaskStatus.PENDING
        self._schedule.set_aside(position)
        assert self._workers is not None
        self._workers.start_soon(self._try_again, position, delay)
        self._log.info("task_retrying", task=task.id, error_kind=error.kind.value, delay_s=round(delay, 3))
        return events.TaskRetrying(
            self._stamp(),
            task.id,
            number,
            error.kind.value,
            error.message,
            delay,
            duration,
            error.usage,
            error.messages,
        )

    async def _try_again(self, position: int, delay: float) -> None:
        await self._around.clock.sleep(delay)
        self._schedule.requeue(position)
        await self._start(*self._take())

    def _failed(self, turn: Turn, error: BackendError, duration: float) -> events.TaskFailed:
        position, task, number = turn.position, turn.task, turn.number
        status = TaskStatus.SKIPPED if task.failure_mode is FailureMode.SKIP else TaskStatus.FAILED
        result = TaskResult(
            task.id,
            status,
            error_kind=error.kind.value,
            error=error.message,
            attempts=number,
            usage=error.usage,
            duration_s=duration,
        )
        self._state.settle(position, result)
        self._schedule.finish(position, status)
        self._log.info("task_failed", task=task.id, error_kind=error.kind.value, status=status.value)
        # The prompt as it was sent is worth keeping where nothing else shows what the failure was about.
        messages = error.messages or ((Message("user", turn.prompt),) if turn.prompt else ())
        return events.TaskFailed(
            self._stamp(), task.id, number, status, error.kind.value, error.message, duration, error.usage, messages
        )
