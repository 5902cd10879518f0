"""The one loop of a run: workers that take tasks from the schedule, run attempts, and hand on what happened.

A worker goes on with the next task itself, so a chain of tasks is one worker and a run never holds more workers than
places. What a completion unlocks is started in the same transaction: its events are submitted together, the worker
waits for one commit, and only then calls the next backend. What the run's policy makes of it, and the tasks that a
reply brings in, are part of that transaction too. State, schedule and submission change in one step without an await,
so cancellation finds them in agreement at every await.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import anyio
import anyio.abc

from plait.backends.protocol import JsonInput
from plait.runner.clock import stamper
from plait.runner.domain import events
from plait.runner.domain.status import TASK_DONE, TaskStatus
from plait.runner.engine.attempt import Attempt, AttemptRunner, RunContext
from plait.runner.engine.backend_call import CallOutcome
from plait.runner.engine.commit import Commit
from plait.runner.engine.growth import Growth
from plait.runner.engine.interrupts import PendingQuestions
from plait.runner.engine.outcome import OutcomeHandler, RunEnd, finish_run
from plait.runner.engine.policy_driver import PolicyDriver
from plait.runner.engine.retry import Delays
from plait.runner.engine.workers import WorkerPool
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.run_state import RunState

_ENDS = frozenset({events.TaskCompleted, events.TaskFailed})


class Executor:
    """Runs what is left of a run in this process, until nothing can start any more or somebody ends it."""

    def __init__(
        self, state: RunState, schedule: Scheduler, growth: Growth, context: RunContext, deciding: PolicyDriver | None
    ) -> None:
        self._state = state
        self._tasks = state.dag.tasks
        self._schedule = schedule
        self._growth = growth
        self._context = context
        self._deciding = deciding
        self._stamp = stamper(context.clock)
        self._turns = AttemptRunner(state, context, self._stamp)
        self._outcomes = OutcomeHandler(state, schedule, growth, context, self._stamp)
        self._workers: anyio.abc.TaskGroup | None = None
        self._idle = WorkerPool(self._work)
        self._awaiting = PendingQuestions(state, schedule, context, self.answer, self._expire, lambda: self._step([]))
        self._delays = Delays(context.clock, self._try_again)
        self._under_way: dict[int, Attempt] = {}
        """The last turn of every task marked at_most_once."""
        self.ended_by: Literal["stop", "cancel", "policy"] | None = None
        """Who ended the run before its time: `stop` leaves it to be resumed, the others are for good."""
        self._winding_down = False
        self._left = False
        self._calls = 0
        """How many backends are being called."""

    async def run(self) -> None:
        """Work until nothing is left, or until `end`. Cancellation ends all attempts and then propagates."""
        try:
            await self._run()
        finally:
            self._left = True  # nobody is there any more to hear of an answer

    async def _run(self) -> None:
        async with anyio.create_task_group() as workers:
            self._workers = self._idle.workers = workers
            if self._deciding is not None and self._deciding.decided.end is not None:
                self.ended_by = self.ended_by or "policy"
            if self.ended_by is not None:
                return
            for position in self._schedule.later:  # first, so that the policy can end them
                until = self._context.inherited.next_tries[position]
                self._delays.begin(workers, position, until - self._context.clock.wall())
            new_events = [event for ended in self._context.inherited.unasked for event in self._asked_about(ended)]
            for position, asking in self._state.asking.items():
                self._awaiting.begin(workers, position, asking)
            turns = [self._turns.adopt(position, one) for position, one in self._context.inherited.adopted.items()]
            self._under_way |= {turn.position: turn for turn in turns if turn.task.at_most_once}
            turns += self._follow_up_ended(new_events)
            await self._start(turns, new_events)

    def end(self, how: Literal["stop", "cancel", "policy"]) -> None:
        """Start nothing more and end the attempts that are under way. Safe to call at any time and more than once."""
        if self.ended_by is None:
            self.ended_by = how
        if self._workers is not None:
            self._workers.cancel_scope.cancel()

    def wind_down(self) -> None:
        """Cancel the run for good, but let the attempts under way come to their end, until `end`. A run that is ending
        already goes on with that.
        """
        if self.ended_by is not None or self._left or self._has_ended:
            return
        self.ended_by, self._winding_down = "cancel", True
        self._context.sink.submit([events.RunCancelling(self._stamp(), self._context.run_id)])
        self._end_when_quiet()

    def answer(self, task_id: str, attempt: int, value: JsonInput, by: str) -> bool:
        """Answer the question with which `attempt` of the task ended; the task goes on. False where that is not what
        it waits for any more, or the run is ending. Raises PlaitError for a value that does not fit.
        """
        if task_id not in self._state.dag:  # whoever may write to the store may send such a note
            return False
        position = self._state.dag.position(task_id)
        asking = self._state.asking.get(position)
        if self.ended_by is not None or self._left or asking is None or self._state.attempts[position] != attempt:
            return False
        answered = self._outcomes.answer(position, asking.checked(value), by)
        self._awaiting.settled(position)
        self._step([answered])
        return True

    @property
    def _is_over(self) -> bool:
        """Whether all that can run has run, and nobody is asked."""
        return self._schedule.exhausted and TaskStatus.WAITING_INPUT not in self._state.statuses

    @property
    def _has_ended(self) -> bool:
        """Whether nothing can follow any more, also for the run's policy: then it is too late to cancel or to stop."""
        return self._is_over and (self._deciding is None or self._deciding.decided.rests)

    def _end_when_quiet(self) -> None:
        if self._winding_down and not self._calls:
            self.end("cancel")

    def finish(self) -> list[events.Event]:
        """Settle what was under way when the workers ended; the events to be submitted, the run's last one included."""
        self._left = True
        has_ended = self._has_ended
        if has_ended and not self._winding_down and self.ended_by != "policy":
            self.ended_by = None  # it came too late: everything that could run had run
        called = {position for position, turn in self._under_way.items() if turn.called}
        decided = None if self._deciding is None else self._deciding.decided
        # Where the policy was not asked about the last end, something may follow, and a resume asks it.
        exhausted = self._schedule.exhausted and (has_ended or not self._is_over)
        ending = RunEnd(self.ended_by, exhausted=exhausted, called=called, decided=decided)
        return finish_run(self._context.run_id, self._state, ending, self._stamp())

    def _follow_up_ended(self, new_events: list[events.Event], ended: str | None = None) -> list[Attempt]:
        """What follows once the task `ended`: ask the policy, then give out every free place. Adds to `new_events`."""
        if ended is not None:
            new_events += self._asked_about(ended)
        turns = self._take(new_events)
        while not turns and self._is_over and (decided := self._asked_about(None)):
            new_events += decided
            turns = self._take(new_events)
        return turns

    def _asked_about(self, ended: str | None) -> list[events.Event]:
        """What the run's policy makes of the end of that task, or of there being nothing left to run."""
        if self._deciding is None or self.ended_by is not None:
            return []
        new_events = self._deciding.about(ended)
        for event in new_events:
            if isinstance(event, events.TaskCancelled):  # nobody waits for its answer any more, or its next attempt
                position = self._state.dag.position(event.task_id)
                self._awaiting.settled(position)
                self._delays.end(position)
        if self._deciding.decided.end is not None:
            self.ended_by = "policy"
        return new_events

    def _take(self, new_events: list[events.Event]) -> list[Attempt]:
        """Unfold and gather what can be, and give out every free place: the turns to be had. Adds to `new_events`."""
        turns: list[Attempt] = []
        while self.ended_by is None and (position := self._schedule.take_for_each()) is not None:
            new_events += self._gathered(position)
        while self.ended_by is None and (position := self._schedule.take()) is not None:
            turn = self._turns.begin(position)
            turns.append(turn)
            if turn.task.at_most_once:
                before = self._under_way.get(position)
                turn.waits = before.waits + 1 if before is not None else 0
                self._under_way[position] = turn
            name = self._context.names[position]
            started = self._state.start(position, self._stamp(), name, turn.session_id, confirmed=turn.confirmed)
            new_events.append(started)
        if self.ended_by is None and self._schedule.enqueue(self._offered) and not self._schedule.taken:
            self._idle.keep_one()
        return turns

    def _offered(self) -> None:
        """Another run has set a place free, or a backend may be asked again."""
        if self.ended_by is None:
            self._step([])

    def _gathered(self, position: int) -> list[events.Event]:
        """The task with `for_each` becomes its parts, or, once they are done, the list of their results."""
        new_events = self._outcomes.expand_or_gather(position)
        if self._state.statuses[position] in TASK_DONE:
            new_events += self._asked_about(self._state.dag.tasks[position].id)
        return new_events

    def _expire(self, position: int) -> None:
        """Nobody has answered the task's question by its deadline, and it has no default: the task fails."""
        failed = self._outcomes.expire(position)
        self._awaiting.settled(position)
        self._step([failed], failed.task_id)

    async def _start(self, turns: list[Attempt], new_events: list[events.Event]) -> None:
        """Make starts durable, then hand each to a worker."""
        if turns or new_events:
            await self._context.sink.submit(new_events).wait()
            self._idle.hand_out(turns)
        self._end_if_decided()
        self._rest_if_over()

    def _step(self, new_events: list[events.Event], ended: str | None = None) -> None:
        """Something happened beside the workers: submit it with what follows, and have that started."""
        assert self._workers is not None
        try:
            turns = self._follow_up_ended(new_events, ended)
        except Exception as error:  # this run's own: who has had it take the step, maybe another run, is not to blame
            self._workers.start_soon(_fail, error)
            return
        self._context.sink.submit(new_events)
        # What is to start waits for the submission like everything else: an empty one is settled behind it.
        nothing_more: list[events.Event] = []
        self._workers.start_soon(self._start, turns, nothing_more)

    def _end_if_decided(self) -> None:
        if self.ended_by == "policy":
            self.end("policy")

    def _rest_if_over(self) -> None:
        """Let everybody go who waits for more, if nothing more can come."""
        if self._schedule.exhausted:
            self._idle.let_go()
            self._awaiting.end()

    async def _work(self, turn: Attempt | None) -> None:
        if turn is None:
            turn = await self._next_turn()
        # Cancelled while the start was written down, a run calls nobody any more.
        while turn is not None and not self._winding_down:
            began = self._context.clock.monotonic() - self._turns.earlier_duration(turn)
            self._calls += 1
            stored, turns = self._conclude(turn, await self._turns.run(turn), began)
            # Where nothing is to follow that, nobody has to be woken for it.
            if turns or self.ended_by is not None or self._schedule.exhausted:
                await stored.wait()
                self._end_when_quiet()
                self._end_if_decided()
            if turns:
                turn = turns.pop()
                self._idle.hand_out(turns)
            else:
                turn = await self._next_turn()

    def _conclude(self, turn: Attempt, outcome: CallOutcome, began: float) -> tuple[Commit, list[Attempt]]:
        """Settle the turn and submit that with what follows: what is set once it is stored, and turns to be had."""
        self._calls -= 1
        new_events = self._outcomes.handle(turn, outcome, self._context.clock.monotonic() - began)
        ended = turn.task.id if type(new_events[0]) in _ENDS else None
        if ended is None:
            self._follow_up(turn.position, new_events[0])
        turns = self._follow_up_ended(new_events, ended)
        stored = self._context.sink.submit(new_events)
        stored.then(partial(self._outcomes.stored, turn))
        return stored, turns

    async def _next_turn(self) -> Attempt | None:
        """Wait to be handed a task; None when the run has come to its end."""
        if self._schedule.exhausted:
            self._rest_if_over()
            return None
        return await self._idle.wait()

    def _follow_up(self, position: int, event: events.Event) -> None:
        """What a task that is not done waits for: its next attempt's time, or an answer."""
        assert self._workers is not None
        if isinstance(event, events.TaskRetrying):
            self._delays.begin(self._workers, position, event.delay_s)
        elif isinstance(event, events.TaskWaiting) and event.asking is not None:
            self._awaiting.begin(self._workers, position, event.asking)

    async def _try_again(self, position: int) -> None:
        self._schedule.requeue(position)
        new_events: list[events.Event] = []
        turns = self._follow_up_ended(new_events)
        await self._start(turns, new_events)


async def _fail(error: Exception) -> None:
    raise error
