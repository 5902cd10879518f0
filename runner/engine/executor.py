"""`Executor`: the loop of a run. The workers take tasks from the scheduler, run attempts and report the outcomes.

After an attempt a worker continues with a task unlocked by the attempt. A chain of tasks thus takes one worker, and a
run holds at most one worker for each slot, adopted attempts aside. Further tasks go to idle workers: waking one costs a
fifth of starting a new one. Each step of the loop:

    an attempt ends              `_conclude`: the outcome changes the state (outcomes.py), and the event says how
    the policy is called         `_call_policy`: added and cancelled tasks become events of the same step
    free slots are given out     `_take`: the tasks that may start now become running
    all events are submitted     in one transaction: an outcome and the starts that follow
    the worker waits             until the submission is stored, or the store is known to be away
    the backends are called      only now: no backend is called before the attempt is stored as running

Answers of earlier runs wait until the calls of the step have begun, and are then taken over a few at a time
(`_take_over_later`): storing thousands of them would hold up the first call. Their dependents start as after outcomes.

State, scheduler and submission change in one step without an await. Cancellation arrives at awaits only, when state,
scheduler and submission agree, so `finish` has nothing to repair. Events from outside the workers take the same path:
an answer, a deadline or a slot freed by another run through `_step`, the end of a retry delay through `_try_again`.

A run ends in one of three ways. The caller then calls `finish` once.

- Nothing can start any more: all workers return.
- `end` cancels the workers.
- `wind_down` lets the attempts under way end and then calls `end`.

A run that parks ends so too once everything that is left waits for a time (`_park_if_all_waits`).

Cancellation of `run` from outside cancels all workers and propagates. `finish` then records the cut attempts as
interrupted, or as waiting for a person's decision if the task is marked at_most_once and the backend was called.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Literal

import anyio
import anyio.abc
import anyio.lowlevel

from plait import events
from plait.backends.backend_protocol import Output
from plait.backends.process.child_process import ProgramBackend
from plait.backends.running_turn import Cancellation
from plait.errors import ErrorKind
from plait.json_form import JsonInput
from plait.runner.domain.asked_question import Way
from plait.runner.domain.run_tuning import Tuning, why_not_again
from plait.runner.engine import policy_driver
from plait.runner.engine.answer_check import Settle
from plait.runner.engine.attempt import Attempt, AttemptRunner
from plait.runner.engine.backend_call import CallOutcome
from plait.runner.engine.checkpointer import Commit
from plait.runner.engine.inbox import PendingQuestions
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.outcomes import EndedBy, OutcomeHandler, deadlines, finish_run
from plait.runner.engine.retries import Delays, ThrottlingReporter, pause_without_credit
from plait.runner.engine.row_reader import RowReader
from plait.runner.engine.work_folders import WorkFolders
from plait.runner.reuse.earlier_answers import EarlierAnswer
from plait.runner.state.budget import Budget, counted_cost
from plait.statuses import TASK_DONE, TaskStatus
from plait.usage import Usage

_TAKEN_OVER_AT_ONCE = 100
PARK_S = 60.0
"""Seconds of a wait from which a run is parked: a shorter one costs less than a new process."""
_LEAST_USD = 0.01
"""What a call of unknown worst case reserves where less is left, so that it asks for more."""
_ENDS = frozenset({events.TaskCompleted, events.TaskFailed, events.TaskSkipped})


_LOST = CallOutcome()
"""The outcome of a call that was cancelled because its task lost a race."""


class Executor:
    """Runs the remaining tasks of a run in this process, until nothing can start any more or the run is ended."""

    def __init__(self, run: LiveRun, outcomes: Callable[[LiveRun], OutcomeHandler] = OutcomeHandler) -> None:
        run.cancellation = Cancellation()
        self._run = run
        self._state = run.state
        self._tasks = run.state.dag.tasks
        self._scheduler = run.scheduler
        self._stamp = run.stamp
        has_writers = any(isinstance(one, ProgramBackend) and one.writes for one in run.options.backends.values())
        self._folders = WorkFolders(run, self._wake) if has_writers else None
        self._attempt_runner = AttemptRunner(run, self._folders, self._slot_for_judge)
        self.outcomes = outcomes(run)
        self._workers: anyio.abc.TaskGroup | None = None
        self._idle: list[asyncio.Future[Attempt | None]] = []
        """What each idle worker waits for: its next attempt, or None at the end of the run."""
        self._throttling = ThrottlingReporter(run)
        self._questions = PendingQuestions(run, self.answer, self._expire, lambda: self._step([]))
        self._delays = Delays(run.options.clock, self._try_again)
        self._reopenings = Delays(run.options.clock, self._reopen)
        """The ends of the pauses of backends, each by the backend and the task for which it was paused."""
        self._under_way: dict[int, Attempt] = {}
        """The attempts that are taken and not settled, by position."""
        self.ended_by: EndedBy | None = None
        """The reason for an early end. A stopped run can be resumed, and after a refusal of the store the run goes on
        from what is stored; the other reasons are final.
        """
        self._parks = run.parks and run.options.store is not None
        self._parked_until = 0.0
        """The Unix time in seconds until which the run is parked."""
        self._closed = False
        self._calls = 0
        """How many backend calls are under way."""
        self._reused: dict[int, EarlierAnswer] = {}
        """The answers to be taken over, by position."""
        self._is_taking_over = False
        self._is_watching = False
        """Whether the folders that tasks wait for are looked at."""
        self._held: deque[tuple[int, float]] = deque()
        """The tasks that wait until there is money for their calls, with the most that each call costs."""
        self._racing: dict[int, anyio.CancelScope] = {}
        """The calls under way in a run with races, by position."""
        self._judging: dict[int, anyio.Event] = {}
        """The attempts that wait for a slot of their judge's backend, by position."""
        self._rows = None if (file := run.state.dag.rows_file) is None else RowReader(run, file)
        run.scheduler.rates.size_of = self._attempt_runner.size
        run.scheduler.rates.usd_of = self._usd_of
        run.scheduler.rates.timer = self._start_timer

    async def run(self) -> None:
        """Run tasks until nothing is left, or until `end`. Cancellation ends all attempts and then propagates."""
        try:
            await self._execute()
        finally:
            self._closed = True  # an answer is refused from now on
            if self._rows is not None:
                self._rows.close()
            if self._folders is not None:
                self._folders.close()
            rates = self._scheduler.rates
            rates.leave()
            rates.timer = None
            for position, (_, reservation) in [*rates.reserved.items()]:
                if (attempt := self._under_way.get(position)) is not None and attempt.has_begun:
                    rates.settle(position, 0, 0, reservation.usd)  # cut: it may have cost as much
                else:
                    rates.give_back(position)
            await rates.settle_money()

    async def _execute(self) -> None:
        async with anyio.create_task_group() as workers:
            self._workers = workers
            if self._run.policy_state.end is not None:
                self.ended_by = self.ended_by or "policy"
            if self.ended_by is not None:
                return
            self._throttling.begin()
            for position in self._scheduler.later:  # first, so that the policy can end these delays
                until = self._run.next_tries[position]
                self._delays.begin(workers, position, until - self._run.options.clock.wall())
            races = range(len(self._tasks)) if self._state.dag.races else ()
            new_events = [event for position in races for event in self._end_race(position)]
            new_events += [event for ended in self._run.policy_backlog for event in self._call_policy(ended)]
            for position, asking in self._state.asking.items():
                self._questions.begin(workers, position, asking)
                if asking.way is Way.CREDIT:
                    name = self._state.moved.get(position) or self._run.task_backends[position]
                    self._scheduler.close_for_person(position, name, pause_without_credit(inf))
            self._begin_reopenings()
            attempts = [self._attempt_runner.adopt(position, one) for position, one in self._run.adopted.items()]
            self._under_way = {attempt.position: attempt for attempt in attempts}
            attempts += self._after_end(new_events)
            await self._start(attempts, new_events)

    def widen(self, concurrency: int) -> None:
        """Let `concurrency` tasks run at once, if it is more than before."""
        self._scheduler.widen(concurrency)
        self._take_offered()

    def retry(self, task_id: str, attempt: int) -> None:
        """Run a task again whose last `attempt` has failed, at once if it waits for the next one. No effect on a task
        that cannot run again now.
        """
        if task_id not in self._state.dag or self.ended_by is not None or self._closed:
            return
        position = self._state.dag.position(task_id)
        status, is_last = self._state.statuses[position], self._state.attempts[position] == attempt
        if is_last and status is TaskStatus.PENDING:
            self._delays.end(position)
            for closing in [one for one in self._reopenings.ends if one[1] == position]:
                self._reopenings.end(closing)
        may_run = self._run.policy is None and why_not_again(self._state.dag, self._tasks[position]) is None
        if is_last and status is TaskStatus.FAILED and may_run:
            reopened = self._state.reopen(position, self._stamp())
            self._scheduler.unpark(position, self._state.statuses)
            self._step([reopened])

    def tune(self, tuning: Tuning) -> None:
        """Start further tasks as a person says."""
        self._scheduler.tune(tuning)
        if self._workers is not None:
            self._take_offered()

    def end(self, by: Literal["stop", "cancel", "policy", "park"]) -> None:
        """Start nothing more and cancel the attempts under way. Any number of calls, at any time, is safe."""
        if self.ended_by is None:
            self.ended_by = by
        if self._workers is not None:
            self._workers.cancel_scope.cancel()

    def wind_down(self) -> None:
        """Cancel the run for good: ask the attempts under way to end, and let them until `end` is called. Do nothing if
        the run is ending already.
        """
        if self.ended_by is not None or self._closed or self._has_ended:
            return
        self.ended_by = "cancel"
        self._run.sink.submit([events.RunCancelling(self._stamp(), self._run.run_id)])
        self._run.cancellation.request()
        for ready in self._judging.values():
            ready.set()
        self._end_when_quiet()

    def settle(self) -> None:
        """Start nothing more, let the attempts under way end, and store their outcomes: the store has refused a change,
        so that the execution is ahead of what is stored.
        """
        if self._closed or self.ended_by in {"stop", "cancel"}:
            return
        self.ended_by = "refusal"
        for ready in self._judging.values():
            ready.set()
        self._end_when_quiet()

    def answer(self, task_id: str, attempt: int, value: JsonInput, by: str) -> bool:
        """Answer the question with which `attempt` of the task ended, and let the task go on. Return False if the
        question is no longer open, or the run is ending. Raise PlaitError if `value` does not fit the question.
        """
        if task_id not in self._state.dag:  # any process with access to the store can send notes
            return False
        position = self._state.dag.position(task_id)
        asking = self._state.asking.get(position)
        if self.ended_by is not None or self._closed or asking is None or self._state.attempts[position] != attempt:
            return False
        answered = self.outcomes.answer(position, asking.checked(value), by)
        self._questions.close(position)
        self._step(answered)
        return True

    @property
    def _is_over(self) -> bool:
        """True if everything that can run has run, and no question is open."""
        return self._scheduler.exhausted and TaskStatus.WAITING_INPUT not in self._state.statuses

    @property
    def _has_ended(self) -> bool:
        """True if the run is over and the policy adds nothing either. The run can then not be cancelled or stopped."""
        return self._is_over and (self._run.policy is None or self._run.policy_state.idle)

    @property
    def _is_winding_down(self) -> bool:
        """Whether the attempts under way are the last ones, and come to their end: see `wind_down` and `settle`."""
        return self.ended_by == "refusal" or self._run.cancellation.requested

    def _end_when_quiet(self) -> None:
        if self._is_winding_down and not self._calls:
            self.end("cancel")

    def finish(self) -> list[events.Event]:
        """Settle the attempts that were cut when the workers ended. Return the events, the run's last one included."""
        self._closed = True
        has_ended = self._has_ended
        if has_ended and not self._is_winding_down and self.ended_by != "policy":
            self.ended_by = None  # the end came too late: everything that could run had run
        called = {i for i, attempt in self._under_way.items() if attempt.task.at_most_once and attempt.has_begun}
        # If the policy was not called for the last end, more tasks may follow, and a resume calls the policy.
        exhausted = self._scheduler.exhausted and (has_ended or not self._is_over)
        return finish_run(
            self._run,
            self.ended_by,
            exhausted=exhausted,
            called=called,
            parked_until=self._parked_until,
        )

    def _after_end(self, new_events: list[events.Event], ended: str | None = None) -> list[Attempt]:
        """Follow up on the task `ended`, then give out every free slot. Add the events to `new_events`."""
        if ended is not None:
            new_events += self._follow(ended)
        attempts = self._take(new_events)
        while not attempts and self._is_over and (decided := self._call_policy(None)):
            new_events += decided
            attempts = self._take(new_events)
        return attempts

    def _follow(self, ended: str) -> list[events.Event]:
        """End the races that the task `ended` has won, and call the run's policy."""
        new_events: list[events.Event] = []
        if self._state.dag.races and self.ended_by is None:
            for position in self._state.dag.dependents[self._state.dag.position(ended)]:
                new_events += self._end_race(position)
        return new_events + self._call_policy(ended)

    def _end_race(self, position: int) -> list[events.Event]:
        """Cancel the dependencies that lost the race for the task at `position`, once one has completed, with the tasks
        that only serve them.
        """
        state, dag, new_events = self._state, self._state.dag, list[events.Event]()
        if state.statuses[position] is not TaskStatus.PENDING or not self._is_won(position):
            return []
        waiting = list(dag.dependencies[position])
        while waiting:
            loser = waiting.pop()
            status = state.statuses[loser]
            if status in TASK_DONE or any(map(self._waits, dag.needed_by(loser))):
                continue
            new_events.append(state.cancel(loser, self._stamp()))
            if status is not TaskStatus.RUNNING:
                self._scheduler.drop(loser)
                self._end_waits(loser)
            else:
                if (budget := self._run.budget) is not None:
                    budget.settle(self._tasks[loser].id, state.results[loser].usage, is_cut=True)
                self._scheduler.withdraw(loser)
                self._scheduler.finish(loser, TaskStatus.CANCELLED)
                if loser in self._racing:
                    self._under_way[loser].over = True
                    self._racing[loser].cancel()
            waiting += dag.needed(loser)
        return new_events

    def _is_won(self, position: int) -> bool:
        """Return whether the task at `position` races its dependencies, and one has completed."""
        statuses, dependencies = self._state.statuses, self._state.dag.dependencies[position]
        return self._tasks[position].race and any(statuses[each] is TaskStatus.COMPLETED for each in dependencies)

    def _waits(self, position: int) -> bool:
        """Return whether the task at `position` still needs what it depends on. A race that is won does not, nor does a
        call need the tasks of its plan: it only waits for their end.
        """
        if self._state.statuses[position] in TASK_DONE or self._is_won(position):
            return False
        return not (self._tasks[position].call is not None and self._state.dag.is_expanded(position))

    def _call_policy(self, ended: str | None) -> list[events.Event]:
        """Call the run's policy for the end of the task `ended`, or, if None, for a run with nothing left to do."""
        if (policy := self._run.policy) is None or self.ended_by is not None:
            return []
        new_events = policy_driver.decide(self._run, policy, ended)
        for event in new_events:
            if isinstance(event, events.TaskCancelled):  # stop waiting for an answer or a retry
                self._end_waits(self._state.dag.position(event.task_id))
        if self._run.policy_state.end is not None:
            self.ended_by = "policy"
        return new_events

    def _end_waits(self, position: int) -> None:
        """Let a task that was cancelled wait for nothing any more."""
        self._questions.close(position)
        self._delays.end(position)
        self._scheduler.end_person_wait(position)
        if self._folders is not None:
            self._folders.end_wait(position)

    def _take(self, new_events: list[events.Event]) -> list[Attempt]:
        """Decide conditions, expand and gather lists, find the tasks that need no call, and give out every free slot.
        Return the attempts; add the events to `new_events`.
        """
        attempts: list[Attempt] = []
        if self._rows is not None and self.ended_by is None:
            new_events += self._rows.read()
        self._take_slotless(new_events)
        self._find_answers(new_events)
        if (budget := self._run.budget) is not None:
            self._release_held(budget)
        while self.ended_by is None and (position := self._scheduler.take()) is not None:
            if self._judging and position in self._judging:
                self._judging[position].set()
            elif self._may_begin(position, new_events):
                attempts.append(self._begin(position, new_events))
        if self.ended_by is None and self._scheduler.enqueue(self._take_offered):
            if not self._scheduler.taken:
                self._keep_one_worker()
            self._throttling.limited(self._scheduler.rates.waiting())
        if self._reused and not self._is_taking_over:
            assert self._workers is not None
            self._is_taking_over = True
            self._workers.start_soon(self._take_over_later)
        return attempts

    def _may_begin(self, position: int, new_events: list[events.Event]) -> bool:
        """Take the folder and reserve the money of a task that holds a slot. Return False if the task has to wait for
        either; the events of the wait are added to `new_events`.
        """
        if self._folders is not None and (waits := self._folders.take(position)) is not None:
            self._wait_for_folder(position)
            new_events += waits
            return False
        budget = self._run.budget
        if budget is None or self._reserve(budget, position, new_events):
            return True
        if self._folders is not None:
            self._folders.give_back(position)
        return False

    def _begin(self, position: int, new_events: list[events.Event]) -> Attempt:
        """Return the task's next attempt, recorded as running."""
        self._under_way[position] = attempt = self._attempt_runner.begin(position)
        budget, own = self._run.budget, self._run.task_backends[position]
        started = self._state.start(
            position,
            self._stamp(),
            attempt.backend,
            attempt.session_id,
            confirmed=attempt.confirmed,
            reserved_usd=None if budget is None else budget.reserved[attempt.task.id] or None,
            moved_from=None if attempt.backend == own else own,
        )
        new_events.append(started)
        return attempt

    def _find_answers(self, new_events: list[events.Event]) -> None:
        """Look for the answers that ready tasks take over, and make those without one eligible."""
        while self.ended_by is None and (ready := self._scheduler.look()):
            for rank, position in ready:
                if self._state.statuses[position] is not TaskStatus.PENDING:  # cancelled meanwhile
                    continue
                if (answer := self.outcomes.find(position)) is None:
                    self._scheduler.enter(rank, position)
                    continue
                self._scheduler.keep_open()
                self._reused[position] = answer
                # The call of another task may be spared.
                if (self._run.policy is not None or self._state.dag.races) and self.ended_by is None:
                    new_events += self._take_over(1)
                    self._take_slotless(new_events)

    def _reserve(self, budget: Budget, position: int, new_events: list[events.Event]) -> bool:
        """Reserve the worst case of the next attempt of a task that holds a slot, 0 if it costs nothing, and return
        True. If it does not fit, return False, and let the task wait until calls under way have ended, or, without any,
        for a higher limit: the question becomes events.
        """
        task, worst = self._tasks[position], self._attempt_runner.worst_case(position)
        if not (budget.limits(task) and worst):
            budget.reserved[task.id] = 0.0  # what it costs all the same is counted
            return True
        if worst == inf:  # nothing else is spent meanwhile
            worst = 0.0 if self._run.unpriced else max(budget.room_for(task), _LEAST_USD)
        is_asked = self._is_budget_asked
        if not is_asked and budget.covers(worst, budget.room_for(task)):
            budget.reserved[task.id] = worst
            return True
        self._scheduler.spare(position)
        if not is_asked and not budget.covers(worst, budget.task_room(task)):
            new_events += self._ask_for_money(position, Way.MAX_COST, worst)
        elif not is_asked and not budget.is_reserved:
            new_events += self._ask_for_money(position, Way.BUDGET, worst)
        else:
            self._scheduler.park(position)
            self._held.append((position, worst))
        return False

    def _usd_of(self, position: int, name: str) -> float:
        worst = self._attempt_runner.worst_case(position, name) or 0.0
        return 0.0 if worst == inf and self._run.unpriced else worst

    def _ask_for_money(self, position: int, way: Way, worst: float) -> list[events.Event]:
        assert self._workers is not None
        new_events = self.outcomes.ask_for_money(position, way, worst)
        self._questions.begin(self._workers, position, self._state.asking[position])
        return new_events

    @property
    def _is_budget_asked(self) -> bool:
        """Whether a person is asked for a higher budget. Nothing else is paid for meanwhile."""
        return any(asking.way is Way.BUDGET for asking in self._state.asking.values())

    def _release_held(self, budget: Budget) -> None:
        """Let the first tasks that wait for money start as far as there is some; one at least, if no call is under way
        that could leave some: it asks for a higher budget.
        """
        if not self._held or self._is_budget_asked:
            return
        room, is_stuck = budget.room, not budget.is_reserved
        while self._held:
            position, worst = self._held[0]
            if self._state.statuses[position] is TaskStatus.PENDING:
                if not budget.covers(worst, room) and not is_stuck:
                    return
                self._scheduler.unpark(position, self._state.statuses)
                room, is_stuck = room - worst, False
            self._held.popleft()

    def _wait_for_folder(self, position: int) -> None:
        """Give the slot of the task back: it waits for its folder."""
        assert self._workers is not None
        assert self._folders is not None
        self._scheduler.spare(position)
        self._scheduler.set_aside(position)
        if not self._is_watching:
            self._is_watching = True
            self._workers.start_soon(self._watch_folders, self._folders)

    async def _watch_folders(self, folders: WorkFolders) -> None:
        await folders.watch(self._run.options.clock.sleep)
        self._is_watching = False

    def _wake(self, position: int) -> None:
        assert self._workers is not None
        self._workers.start_soon(self._try_again, position)

    async def _take_over_later(self) -> None:
        """Complete the tasks with answers of earlier runs, once the attempts that were begun with them are stored."""
        nothing_more: list[events.Event] = []
        await self._run.sink.submit(nothing_more).wait()
        while self._reused and self.ended_by is None:
            await anyio.lowlevel.checkpoint()
            self._step(self._take_over(_TAKEN_OVER_AT_ONCE))
        self._is_taking_over = False

    def _take_over(self, limit: int) -> list[events.Event]:
        """Complete the next tasks with answers of earlier runs, up to `limit`. Return the events."""
        new_events: list[events.Event] = []
        for position in list(islice(self._reused, limit)):
            self._scheduler.end_keep_open()
            answer = self._reused.pop(position)
            if self.ended_by is None and self._state.statuses[position] is TaskStatus.PENDING:
                new_events += self.outcomes.take_over(position, answer)
                new_events += self._follow(self._tasks[position].id)
        return new_events

    def _take_slotless(self, new_events: list[events.Event]) -> None:
        while self.ended_by is None and (position := self._scheduler.take_slotless()) is not None:
            new_events += self._decide_or_expand(position)

    def _take_offered(self) -> None:
        """Take tasks, because another run has set a slot free or a backend may be called again."""
        if self.ended_by is None and not self._closed:
            self._step([])

    def _decide_or_expand(self, position: int) -> list[events.Event]:
        """Decide the condition of a task, or the vote between its samples. Expand a task with `for_each` into its
        parts, or a call into the tasks of its plan, and gather their results once all are done.
        """
        task = self._tasks[position]
        # The condition of a list counts for each part. A call that has added its tasks has been decided.
        is_decided = position in self._state.parts or not self._scheduler.is_undecided(position)
        gathers = task.for_each is not None or (task.calls and is_decided)
        settle = self.outcomes.expand_or_gather if gathers else self.outcomes.decide
        new_events = (settle if task.vote is None else self.outcomes.vote)(position)
        if self._state.statuses[position] in TASK_DONE:
            new_events += self._follow(self._tasks[position].id)
        return new_events

    def _expire(self, position: int) -> None:
        """Fail the task at `position`: the question has neither an answer at the deadline nor a default."""
        failed = self.outcomes.expire(position)
        self._questions.close(position)
        self._step([failed], failed.task_id)

    async def _start(self, attempts: list[Attempt], new_events: list[events.Event]) -> None:
        """Wait until the starts are stored, then hand each attempt to a worker."""
        if attempts or new_events:
            await self._run.sink.submit(new_events).wait()
            self._assign(attempts)
        self._end_if_decided()
        self._release_idle_if_over()
        if self._parks:
            self._park_if_all_waits()

    def _step(self, new_events: list[events.Event], ended: str | None = None) -> None:
        """Submit events from outside the workers with the starts that follow, and run the started attempts."""
        assert self._workers is not None
        try:
            attempts = self._after_end(new_events, ended)
        except Exception as error:  # fails this run, not the caller, which may be another run
            self._workers.start_soon(_fail, error)
            return
        self._run.sink.submit(new_events)
        # The starts wait for the submission above: an empty submission is settled behind it.
        nothing_more: list[events.Event] = []
        self._workers.start_soon(self._start, attempts, nothing_more)

    def _end_if_decided(self) -> None:
        if self.ended_by == "policy":
            self.end("policy")

    def _park_if_all_waits(self) -> None:
        """Leave the run if everything that is left of it waits for a time, other tasks for a person at most. An answer
        that waits for its judge is kept by this process alone.
        """
        if self._calls or self.ended_by is not None:
            return
        if (until := self._scheduler.waits_until(self._delays.ends)) is None:
            return
        until = min(until, *deadlines(self._state), inf)
        if until - self._run.options.clock.wall() > PARK_S:
            self._parked_until = until
            self.end("park")

    def _release_idle_if_over(self) -> None:
        """Release idle workers and deadlines if nothing more can come."""
        if self._scheduler.exhausted:
            for handed in self._idle:
                if not handed.done():
                    handed.set_result(None)
            self._idle.clear()
            self._questions.end()
            self._reopenings.end_all()

    async def _work(self, attempt: Attempt | None) -> None:
        assert self._workers is not None
        if attempt is None:
            attempt = await self._next_turn()
        # A run that was cancelled while the start was written calls no backend any more.
        while attempt is not None and not self._is_winding_down:
            if self._state.statuses[attempt.position] is TaskStatus.CANCELLED:  # lost a race before it was called
                self._end_attempt(attempt, _LOST)
                attempt = await self._next_turn()
                continue
            began = self._run.options.clock.monotonic()
            if attempt.adopted is not None:
                began -= self._attempt_runner.earlier_duration(attempt)
            self._calls += 1
            if self._scheduler.is_probe(attempt.position):
                accepted = anyio.Event()
                attempt.accepted = accepted.set
                self._workers.start_soon(self._accept_probe, attempt, accepted)
            call = self._attempt_runner.call(attempt)
            outcome = await (self._race(attempt, call) if self._state.dag.races else call)
            stored, attempts = self._conclude(attempt, outcome, began)
            # If nothing follows the submission, the worker need not wait for the submission.
            if attempts or self.ended_by is not None or self._scheduler.exhausted:
                await stored.wait()
                self._end_when_quiet()
                self._end_if_decided()
            if attempts:
                attempt = attempts.pop()
                self._assign(attempts)
            else:
                attempt = await self._next_turn()

    async def _race(self, attempt: Attempt, call: Awaitable[CallOutcome]) -> CallOutcome:
        """Await the call, which `_end_race` may cancel."""
        with anyio.CancelScope() as scope:
            self._racing[attempt.position] = scope
            try:
                return await call
            finally:
                del self._racing[attempt.position]
        return _LOST

    def _conclude(self, attempt: Attempt, outcome: CallOutcome, began: float) -> tuple[Commit, list[Attempt]]:
        """Settle the attempt and submit the events with the starts that follow. Return the commit of the submission,
        and the attempts to run once the commit is set.
        """
        self._calls -= 1
        self._end_attempt(attempt, outcome)
        if self._state.statuses[attempt.position] is TaskStatus.CANCELLED:  # lost a race, and is settled
            return self._run.sink.submit([]), []
        if self._run.cancellation.requested and outcome.error is not None:
            # No failure of the task: the attempt was asked to end. `finish` cancels the task.
            self._state.spend(attempt.position, outcome.error.usage)
            self._scheduler.withdraw(attempt.position)
            self._run.program_log.debug(
                "attempt_cancelled", outcome.error, task=attempt.task.id, attempt=attempt.number
            )
            return self._run.sink.submit([]), []
        new_events = self.outcomes.handle(attempt, outcome, self._run.options.clock.monotonic() - began)
        ended = attempt.task.id if type(new_events[0]) in _ENDS else None
        if ended is None:
            self._begin_wait(attempt.position, new_events[0])
            self._begin_reopenings()
        attempts = self._after_end(new_events, ended)
        stored = self._run.sink.submit(new_events)
        stored.then(partial(self.outcomes.stored, attempt))
        return stored, attempts

    async def _slot_for_judge(self, attempt: Attempt, name: str, used: Usage) -> Settle | None:
        """Implement `AnswerCheck.run`: the attempt ends with the slot that it has then. Once the store has refused a
        change, answers that are there are judged without a slot, since none is given out any more.
        """
        position, rates = attempt.position, self._scheduler.rates
        self._settle_rate(position, used)
        if self.ended_by is None and self._scheduler.move(position, name):
            self._judging[position] = ready = anyio.Event()
            try:
                self._step([])
                if not ready.is_set():
                    self._attempt_runner.report(attempt, Output("waiting", f"waits for a slot of {name} to be judged"))
                await ready.wait()
            finally:
                del self._judging[position]
        if self.ended_by == "cancel":
            rates.give_back(position)
            return None
        return partial(self._settle_rate, position)

    async def _accept_probe(self, attempt: Attempt, accepted: anyio.Event) -> None:
        """Let further tasks start on the backend once it has accepted `attempt`."""
        await accepted.wait()
        if not attempt.over and self._scheduler.accept(attempt.position):
            self._take_offered()

    def _end_attempt(self, attempt: Attempt, outcome: CallOutcome) -> None:
        """Give the attempt's folder back, and settle its share of a rate limit, and of the budget, with the real
        usage.
        """
        attempt.over = True
        attempt.accepted()  # ends the watch, if the attempt is a probe
        del self._under_way[attempt.position]
        if self._folders is not None:
            self._folders.give_back(attempt.position)
        usage, budget = outcome.usage, self._run.budget
        kind = None if outcome.error is None else outcome.error.kind.value
        if budget is not None and attempt.task.id in budget.reserved:
            budget.settle(attempt.task.id, usage, error_kind=kind, called=attempt.has_begun)
        if attempt.has_begun:
            self._settle_rate(attempt.position, usage, kind)
        else:
            self._scheduler.rates.give_back(attempt.position)

    def _settle_rate(self, position: int, usage: Usage, error_kind: str | None = None) -> None:
        """Settle the share of a rate limit, if the task has one."""
        if (share := self._scheduler.rates.reserved.get(position)) is not None:
            cost, _ = counted_cost(usage, share[1].usd, error_kind=error_kind)
            self._scheduler.rates.settle(position, usage.input_tokens, usage.output_tokens, cost)

    def _start_timer(
        self, wait: float | Callable[[], Awaitable[None]], call: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Call `call` after `wait` seconds, or once the awaitable is done that `wait` returns, unless the returned
        function is called before, or the workers end. Return None if the workers end already: nothing would end it.
        """
        assert self._workers is not None
        if self._workers.cancel_scope.cancel_called:
            return None
        scope = anyio.CancelScope()
        self._workers.start_soon(self._call_later, wait, call, scope)
        return scope.cancel

    async def _call_later(
        self, wait: float | Callable[[], Awaitable[None]], call: Callable[[], None], scope: anyio.CancelScope
    ) -> None:
        with scope:
            try:
                await (wait() if callable(wait) else self._run.options.clock.sleep(wait))
            except anyio.get_cancelled_exc_class():
                if not scope.cancel_called:  # the run ends: without its timer it would hold up the other runs
                    self._scheduler.rates.leave()
                raise
        if not scope.cancel_called:
            call()

    async def _next_turn(self) -> Attempt | None:
        """Wait for the next attempt to run. Return None at the end of the run."""
        if self._scheduler.exhausted:
            self._release_idle_if_over()
            return None
        if self._parks:
            self._park_if_all_waits()
        return await self._wait_idle()

    async def _wait_idle(self) -> Attempt | None:
        handed: asyncio.Future[Attempt | None] = asyncio.get_running_loop().create_future()
        self._idle.append(handed)
        return await handed

    def _assign(self, attempts: Sequence[Attempt]) -> None:
        """Wake an idle worker, or start a new worker, for each attempt."""
        assert self._workers is not None
        for attempt in attempts:
            if not self._idle:
                self._workers.start_soon(self._work, attempt)
                continue
            handed = self._idle.pop()
            if not handed.done():  # a cancelled worker: all workers are being cancelled, so nothing more starts
                handed.set_result(attempt)

    def _keep_one_worker(self) -> None:
        """Keep at least one idle worker, so that the task group, and with the group the run, does not end."""
        assert self._workers is not None
        if not self._idle:
            self._workers.start_soon(self._work, None)

    def _begin_wait(self, position: int, event: events.Event) -> None:
        """Begin to wait for the time of the task's next attempt, or for an answer."""
        assert self._workers is not None
        if isinstance(event, events.TaskRetried):
            if not event.delay_s and (self._run.options.spares or event.error_kind == ErrorKind.NO_CREDIT):
                self._scheduler.requeue(position)  # it moves, or waits for credit with the task that asks
            else:
                self._delays.begin(self._workers, position, event.delay_s)
        elif isinstance(event, events.TaskWaiting) and event.asked is not None:
            self._questions.begin(self._workers, position, self._state.asking[position])

    def _begin_reopenings(self) -> None:
        """Wait for the ends of the pauses of backends."""
        assert self._workers is not None
        while self._scheduler.closings:
            name, position, until = self._scheduler.closings.pop()
            self._reopenings.begin(self._workers, (name, position), until - self._run.options.clock.wall())

    async def _reopen(self, closing: tuple[str, int]) -> None:
        self._scheduler.reopen(*closing)
        self._take_offered()

    async def _try_again(self, position: int) -> None:
        self._scheduler.requeue(position)
        new_events: list[events.Event] = []
        attempts = self._after_end(new_events)
        await self._start(attempts, new_events)


async def _fail(error: Exception) -> None:
    raise error
