"""`OutcomeHandler`: from an attempt's outcome to its event. The handler decides between completion, retry, failure and
question, calls the matching verb of `RunState`, and updates the scheduler. `finish_run` does the same when a run ends.

This module has no await, so state, scheduler and submission agree whenever a cancellation arrives.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import Literal, TypeAlias

from plait import events
from plait.backends.backend_protocol import Abilities, Reply
from plait.clock_and_ids import iso, parse_time
from plait.dialogue import Message, Question
from plait.errors import BackendError, DAGError, ErrorKind, PlanError, PromptError
from plait.json_form import JsonValue, to_json
from plait.runner.domain.asked_question import GO_ON_SCHEMA, Asking, Way, credit_question
from plait.runner.domain.continuation import Continuation, correction_prompt, invalid_tasks_error
from plait.runner.domain.votes import decide_vote
from plait.runner.engine import growth
from plait.runner.engine.attempt import Attempt
from plait.runner.engine.backend_call import CallOutcome
from plait.runner.engine.growth import CONDITION
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.retries import (
    CREDIT_PROBE_S,
    deserves_retry,
    pause_of,
    pause_without_credit,
    retry_delay,
)
from plait.runner.reuse.earlier_answers import EarlierAnswer
from plait.runner.state.budget import BUDGET, raise_of
from plait.runner.state.run_state import RunState
from plait.safe_text import clean_text
from plait.statuses import TASK_DONE, RunStatus, TaskStatus
from plait.task import Task, at_most_once_question, failed_status
from plait.usage import NO_USAGE, Usage

GATHERING = "for_each"
"""The backend name in the events of a task with `for_each`, which only gathers results."""
CALLING = "plan"
"""The backend name in the events of a task that calls a plan, which only gathers results."""
VOTING = "vote"
"""The backend name in the events of a task with `repeat`, whose samples call."""
DECIDING = "when"
"""The backend name in the events of a task with a condition that is false, or cannot be evaluated."""
_LONGEST_CONDITION = 300
_MOST_NAMED = 5
_TRIES_TO_ADD = 2
"""The number of answers with invalid tasks after which a task fails."""
_TOO_LATE_TO_ASK = (
    "a task marked at_most_once cannot call ask(): after the answer the task's code would run a second time; "
    "call ask() in an earlier task"
)


class OutcomeHandler:
    """Settles the attempts of one run."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._state = run.state
        self._scheduler = run.scheduler
        self._stamp = run.stamp

    def handle(self, attempt: Attempt, outcome: CallOutcome, duration: float) -> list[events.Event]:
        """Apply the outcome of `attempt` to the run. Return the events, the event of the task first."""
        if outcome.asked is not None:
            if attempt.task.at_most_once:
                return [self._fail(attempt, BackendError(ErrorKind.UNEXPECTED, _TOO_LATE_TO_ASK), duration)]
            return [self._wait_for_answer(attempt, outcome.asked, Way.CALL, None, duration)]
        if outcome.error is not None and outcome.error.kind is ErrorKind.CHECK_FAILED:
            tries = 1 if attempt.task.check is None else attempt.task.check.tries
            return [self._correct_or_fail(attempt, outcome.error, duration, tries)]
        if outcome.error is not None:
            return [self._retry_or_fail(attempt, outcome.error, duration)]
        assert outcome.reply is not None
        if outcome.reply.question is not None:
            return [self._wait_for_answer(attempt, outcome.reply.question, Way.REPLY, outcome.reply, duration)]
        added: list[events.Event] = []
        if outcome.reply.tasks or attempt.task.adds_tasks:
            try:
                added += growth.from_reply(self._run, attempt.task, outcome.reply)
            except DAGError as error:
                text, usage = invalid_tasks_error(error), outcome.reply.usage
                turn = attempt.turn(outcome.reply)
                failure = BackendError(ErrorKind.INVALID_OUTPUT, text, usage=usage, messages=turn)
                return [self._correct_or_fail(attempt, failure, duration, _TRIES_TO_ADD)]
        return [self._complete(attempt, outcome.reply, outcome.data_json, duration), *added]

    def _retry_or_fail(self, attempt: Attempt, error: BackendError, duration: float) -> events.TaskEvent:
        self._run.program_log.debug("attempt_failed", error, task=attempt.task.id, attempt=attempt.number)
        if attempt.resumes_interrupted and error.kind is ErrorKind.SESSION_LOST:
            return self._retry(attempt, error, duration, 0.0)  # not the fault of the task: start over
        if attempt.task.at_most_once and attempt.place is not None and error.kind is ErrorKind.CRASHED:
            return self._wait_for_decision(attempt, error)
        if error.kind is ErrorKind.NO_CREDIT:
            return self._go_without_credit(attempt, error, duration)
        throttled = self._state.count_failure(attempt.position, error.kind, *self._scheduler.refusals(attempt.position))
        failures = self._state.failures(attempt.position)
        retry = attempt.task.retry_policy
        if not attempt.task.at_most_once and deserves_retry(retry, failures, error):
            limited = error.kind is ErrorKind.RATE_LIMITED
            delay = retry_delay(
                retry, max(failures, throttled), error.retry_after, self._run.options.rng, limited=limited
            )
            continuation = _continuation_after(attempt, error)
            if throttled:
                now = self._run.options.clock.wall()
                pause = pause_of(error, delay, now, exhausted=attempt.exhausted)
                self._scheduler.throttle(attempt.position, pause)
                if pause.probe:  # a spare may take the task over
                    delay = min(delay, max(0.0, self._scheduler.others_open_at(attempt.position) - now))
            return self._retry(attempt, error, duration, delay, continuation)
        if throttled:
            self._scheduler.refuse_for_good(attempt.position)
        return self._fail(attempt, error, duration)

    def _go_without_credit(self, attempt: Attempt, error: BackendError, duration: float) -> events.TaskEvent:
        """Let the task go on with a spare of its backend, whose account has no credit left, or else ask a person to top
        the account up. One task asks for all of the backend; the others wait for the answer with it.
        """
        position, name, now = attempt.position, attempt.backend, self._run.options.clock.wall()
        continuation, scheduler = _continuation_after(attempt, error), self._scheduler
        if not attempt.task.at_most_once:
            others = scheduler.others_open_at(position)
            if others != inf:
                scheduler.throttle(position, pause_without_credit(now + CREDIT_PROBE_S))
                return self._retry(attempt, error, duration, max(0.0, others - now), continuation)
            if scheduler.asks_for_credit(name):
                return self._retry(attempt, error, duration, 0.0, continuation)
        asking = Asking(Question(credit_question(name, error.message), GO_ON_SCHEMA), Way.CREDIT)
        scheduler.close_for_person(position, name, pause_without_credit(inf))
        return self._ask(position, asking, continuation, duration, error.usage, error.messages)

    def _ask(
        self,
        position: int,
        asking: Asking,
        continuation: Continuation | None,
        duration: float = 0.0,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
    ) -> events.TaskWaiting:
        waiting = self._state.wait_for_answer(
            position, self._stamp(), asking, duration, usage, messages, continuation=continuation
        )
        self._scheduler.park(position)
        self._run.program_log.info("task_waiting_input", task=waiting.task_id)
        return waiting

    def _wait_for_decision(self, attempt: Attempt, error: BackendError) -> events.TaskWaiting:
        """Let a person decide whether the attempt, which was lost with its host, took effect."""
        question = f"{error.message}; {at_most_once_question(attempt.number)}"
        waiting = self._state.wait_for_decision(attempt.position, self._stamp(), question, crashed=False)
        self._scheduler.park(attempt.position)
        return waiting

    def _complete(self, attempt: Attempt, reply: Reply, data_json: str | None, duration: float) -> events.TaskCompleted:
        position, at, session_id = attempt.position, self._stamp(), attempt.session_id
        is_plain = attempt.continuation is None and _is_prompt_and_answer(reply, attempt.prompt)
        turn = attempt.prompt if is_plain else attempt.messages(reply)
        earlier = _earlier_messages(attempt)
        completed = self._state.complete(
            position, at, reply, data_json, duration, session_id, turn=turn, earlier_messages=earlier
        )
        if self._scheduler.searches:
            self._scheduler.call_ended(position, duration, self._run.options.clock.monotonic())
        self._scheduler.finish(position, TaskStatus.COMPLETED)
        return completed

    def stored(self, attempt: Attempt) -> None:
        """Let the conversation of the settled attempt be freed. While the store is away, all stay in memory."""
        if not (self._state.keeps_all or self._run.sink.away):
            self._state.settle_conversation(attempt.position)

    def _wait_for_answer(
        self, attempt: Attempt, question: Question, way: Way, reply: Reply | None, duration: float
    ) -> events.TaskWaiting:
        """Let the task wait for an answer, and prepare the next attempt as far as possible without the answer."""
        now = self._run.options.clock.wall()
        asking = Asking(question, way, None if question.deadline is None else iso(now + question.deadline))
        if reply is None:
            return self._ask(attempt.position, asking, None, duration)
        messages = attempt.messages(reply)
        continuation = Continuation(attempt.session_id, (*_earlier_messages(attempt), *messages))
        return self._ask(attempt.position, asking, continuation, duration, reply.usage, messages)

    def _correct_or_fail(
        self, attempt: Attempt, failure: BackendError, duration: float, tries: int
    ) -> events.TaskEvent:
        """Continue the conversation of a refused answer with the reason; fail the task after `tries` answers."""
        self._state.count_failure(attempt.position, failure.kind)
        if self._state.refusals(attempt.position) + 1 >= tries or attempt.task.at_most_once:
            return self._fail(attempt, failure, duration)
        refused = () if attempt.continuation is None else attempt.continuation.refused
        continuation = Continuation(
            attempt.session_id,
            _earlier_messages(attempt),
            correction=correction_prompt(failure.message),
            refused=(*refused, *failure.messages),
        )
        return self._retry(attempt, failure, duration, 0.0, continuation)

    def _retry(
        self,
        attempt: Attempt,
        error: BackendError,
        duration: float,
        delay: float,
        continuation: Continuation | None = None,
    ) -> events.TaskRetried:
        retrying = self._state.retry(attempt.position, self._stamp(), error, delay, duration, continuation)
        self._scheduler.set_aside(attempt.position)
        self._run.program_log.info(
            "task_retried", task=attempt.task.id, error_kind=error.kind.value, delay_s=round(delay, 3)
        )
        return retrying

    def _fail(self, attempt: Attempt, error: BackendError, duration: float) -> events.TaskFailed:
        # Without messages from the backend, keep the prompt, so that the failure can be understood.
        messages = error.messages or ((Message("user", attempt.prompt),) if attempt.prompt else ())
        self._scheduler.finish(attempt.position, failed_status(attempt.task.failure_mode))
        return self.fail(attempt.position, error, duration, messages)

    def ask_for_money(self, position: int, way: Way, worst: float) -> list[events.Event]:
        """Let the task at `position`, which holds a slot and has not begun, wait for a higher limit of its cost or of
        that of its run. Return the events: an attempt without a call, which ends with the question.
        """
        assert self._run.budget is not None
        task, continuation = self._state.dag.tasks[position], self._state.continuations.get(position)
        session_id = None if continuation is None else continuation.session_id
        is_confirmed = continuation is not None and continuation.interrupted
        started = self._state.start(position, self._stamp(), BUDGET, session_id, confirmed=is_confirmed)
        asking = Asking(Question(*self._run.budget.question(way, task, worst)), way)
        return [started, self._ask(position, asking, continuation)]

    def answer(self, position: int, value: JsonValue, by: str) -> list[events.Event]:
        """Answer the waiting task at `position` with `value`, already checked against the question. Return the
        events.
        """
        at, asking = self._stamp(), self._state.asking[position]
        answered = self._state.answer(position, at, value, by)
        if asking.way is Way.CREDIT:
            self._scheduler.end_person_wait(position)
        self._scheduler.unpark(position, self._state.statuses)
        raises = raise_of(asking, answered.task_id, value, at)
        for raised in raises:
            assert self._run.budget is not None
            self._run.budget.set_limit(raised)
        return [answered, *raises]

    def expire(self, position: int) -> events.TaskFailed:
        """Fail the waiting task at `position`, because no answer arrived in time."""
        error = f"no answer by the deadline: {self._state.questions[position]}"
        failed = self.fail(position, BackendError(ErrorKind.TIMEOUT, error[:2000]))
        self._scheduler.finish_without_slot(position, failed.status)
        return failed

    def find(self, position: int) -> EarlierAnswer | None:
        """Return the answer that the task takes over in place of a call; None without."""
        assert self._run.answers is not None  # else the scheduler gives no task to be looked at
        return self._run.answers.find(self._state, position)

    def take_over(self, position: int, answer: EarlierAnswer) -> list[events.Event]:
        """Complete the task with `answer`. Return the events."""
        session = None if answer.session_id is None else self._session_to_fork(position, answer.session_id)
        started = self._state.start(position, self._stamp(), answer.source, session, confirmed=session is not None)
        task, reply = self._state.dag.tasks[position], Reply(answer.text, answer.data)
        prompt = clean_text(self._state.texts(task).prompt()) if answer.prompt is None else answer.prompt
        turn = answer.messages or prompt
        completed = self._state.complete(
            position, self._stamp(), reply, answer.data_json, session_id=session, turn=turn
        )
        self._scheduler.finish_without_slot(position, TaskStatus.COMPLETED)
        return [started, completed, *([growth.add(self._run, answer.adds, task.id)] if answer.adds else [])]

    def _session_to_fork(self, position: int, session_id: str) -> str | None:
        """Return the session of an earlier run if the backend can fork the session. Otherwise two runs would write in
        one session; then the conversation is replayed from the messages.
        """
        backend = self._run.options.backends[self._run.task_backends[position]]
        return session_id if Abilities.of(backend).can_fork else None

    def expand_or_gather(self, position: int) -> list[events.Event]:
        """Expand the task with `for_each` at `position` into parts, or gather the results once all parts are done.

        The task holds no slot. If expansion fails, the task fails.
        """
        state = self._state
        if state.dag.tasks[position].calls:
            return self._call_or_return(position)
        if position in state.parts:
            return self._end_for_each(position, growth.collect(self._run, position))
        try:
            return growth.expand(self._run, position)
        except DAGError as error:
            return self._end_for_each(position, BackendError(ErrorKind.INVALID_REQUEST, str(error)[:2000]))

    def _call_or_return(self, position: int) -> list[events.Event]:
        """Add the tasks of the plan that the task at `position` calls, or end the task once they have ended: with the
        result of the plan, with the next round of a loop, or as failed.
        """
        task, run = self._state.dag.tasks[position], self._run
        assert task.call is not None
        try:
            if position not in self._state.parts:
                return growth.add_round(run, position)
            if unfinished := growth.unfinished(run, position):
                shown = ", ".join(unfinished[:_MOST_NAMED]) + (", ..." if len(unfinished) > _MOST_NAMED else "")
                message = f"not all tasks of {'the round' if task.call.until else 'the plan'} are done: {shown}"
                first = self._state.results.get(self._state.dag.position(unfinished[0]))
                message += f"; {unfinished[0]}: {first.error}" if first is not None else " cannot start"
                return self._end_for_each(position, BackendError(ErrorKind.CHILD_FAILED, message[:2000]))
            if growth.is_reached(run, position):
                return self._end_for_each(position, growth.returned(run, position))
            if (rounds := growth.rounds(run, position)) < task.call.max:
                return growth.add_round(run, position)
        except (DAGError, PlanError, PromptError) as error:
            return self._end_for_each(position, BackendError(ErrorKind.INVALID_REQUEST, str(error)[:2000]))
        condition = _shortened(task.call.until or "")
        message = f"{condition} is still false after {rounds} {'round' if rounds == 1 else 'rounds'} (max)"
        return self._end_for_each(position, BackendError(ErrorKind.LOOP_EXHAUSTED, message))

    def vote(self, position: int) -> list[events.Event]:
        """Complete the task at `position`, which holds no slot, with the answer that its samples vote for."""
        state, task = self._state, self._state.dag.tasks[position]
        results = {name: state.results[state.dag.position(name)] for name in task.depends_on}
        if all(each.error_kind == CONDITION for each in results.values() if not each.id.endswith(".judge")):
            return self._skip(position, VOTING, next(iter(results.values())).error or "")
        try:
            text, data, how = decide_vote(task, results)
        except BackendError as error:
            return self._fail_without_slot(position, VOTING, error)
        data_json = None if data is None else to_json(data)
        return self._complete_without_slot(position, VOTING, Reply(text, data), data_json, (Message("system", how),))

    def decide(self, position: int) -> list[events.Event]:
        """Make the task at `position`, which holds no slot, eligible if the task's condition is true; skip the task if
        the condition is false, and fail the task if the condition cannot be evaluated. Return the events.
        """
        task = self._state.dag.tasks[position]
        try:
            is_wanted = self._state.texts(task).is_wanted()
        except PromptError as error:
            message = f"the condition {_shown(task)} cannot be evaluated: {error}"
            return self._fail_without_slot(position, DECIDING, BackendError(ErrorKind.INVALID_REQUEST, message[:2000]))
        if is_wanted:
            self._scheduler.admit(position)
            return []
        self._run.program_log.info("task_skipped", task=task.id)
        return self._skip(position, DECIDING, f"{_shown(task)} is false")

    def _skip(self, position: int, backend: str, reason: str) -> list[events.Event]:
        """Skip the task at `position`, which holds no slot, because a condition is false."""
        started = self._state.start(position, self._stamp(), backend)
        skipped = self._state.skip(position, self._stamp(), CONDITION, reason)
        self._scheduler.finish_without_slot(position, skipped.status)
        return [started, skipped]

    def _complete_without_slot(
        self, position: int, backend: str, reply: Reply, data_json: str | None, turn: tuple[Message, ...] = ()
    ) -> list[events.Event]:
        started = self._state.start(position, self._stamp(), backend)
        completed = self._state.complete(position, self._stamp(), reply, data_json, turn=turn)
        self._scheduler.finish_without_slot(position, TaskStatus.COMPLETED)
        return [started, completed]

    def _fail_without_slot(self, position: int, backend: str, error: BackendError) -> list[events.Event]:
        started = self._state.start(position, self._stamp(), backend)
        failed = self.fail(position, error)
        self._scheduler.finish_without_slot(position, failed.status)
        return [started, failed]

    def _end_for_each(self, position: int, outcome: JsonValue | BackendError) -> list[events.Event]:
        name = CALLING if self._state.dag.tasks[position].call is not None else GATHERING
        if isinstance(outcome, BackendError):
            return self._fail_without_slot(position, name, outcome)
        reply = Reply(outcome) if isinstance(outcome, str) else Reply(to_json(outcome), outcome)
        return self._complete_without_slot(position, name, reply, None if reply.data is None else reply.text)

    def fail(
        self, position: int, error: BackendError, duration: float = 0.0, messages: tuple[Message, ...] = ()
    ) -> events.TaskFailed:
        """Fail the task. The caller updates the scheduler."""
        failed = self._state.fail(position, self._stamp(), error, duration, messages)
        self._run.program_log.info(
            "task_failed", task=failed.task_id, error_kind=failed.error_kind, status=failed.status.value
        )
        return failed


def _shown(task: Task) -> str:
    """Return the condition of `task` in one line, cut to a length for a message."""
    return _shortened(task.when or "")


def _shortened(text: str) -> str:
    condition = " ".join(text.split())
    return condition if len(condition) <= _LONGEST_CONDITION else f"{condition[:_LONGEST_CONDITION]}..."


def _continuation_after(attempt: Attempt, error: BackendError) -> Continuation | None:
    """Return how the next attempt continues the session of the failed attempt; None if the session is unusable."""
    if not error.continues_session or attempt.session_id is None:
        continuation = attempt.continuation
        is_correction = continuation is not None and continuation.correction is not None
        return continuation if is_correction and error.kind is not ErrorKind.SESSION_LOST else None
    return replace(attempt.continuation or Continuation(None), session_id=attempt.session_id, interrupted=True)


def _earlier_messages(attempt: Attempt) -> tuple[Message, ...]:
    """Return the messages of earlier attempts in the conversation of the task."""
    return () if attempt.continuation is None else attempt.continuation.messages


EndedBy: TypeAlias = Literal["stop", "cancel", "policy", "refusal", "park"]
"""What ends a run early: a stop, its cancellation, a decision of its policy, a store that refuses a change, or a time
for which everything waits.
"""


def finish_run(
    run: LiveRun,
    by: EndedBy | None,
    *,
    exhausted: bool,
    called: Collection[int],
    parked_until: float,
) -> list[events.Event]:
    """Settle the unfinished tasks of a run, which ended early if `by` is not None. Return the events; the last event is
    the end of the run.

    `exhausted`: nothing was left to run. `called` are the tasks marked at_most_once with a backend call.
    `parked_until` is the Unix time until which a parked run waits.
    """
    state, at, decided = run.state, run.stamp(), run.policy_state
    fails = decided.end is RunStatus.FAILED  # unfinished tasks then remain for a resume with retry_failed
    new_events: list[events.Event] = []
    for_good = by == "cancel" or (by == "policy" and not fails)
    for position, status in enumerate(state.statuses):
        if for_good and status not in TASK_DONE:
            new_events.append(state.cancel(position, at))
        elif status is TaskStatus.RUNNING and position in called:
            question = at_most_once_question(state.attempts[position])
            new_events.append(state.wait_for_decision(position, at, question, crashed=False))
        elif status is TaskStatus.RUNNING:
            new_events.append(state.interrupt(position, at, "the run was stopped"))
    if by == "cancel":
        last: events.RunEnded = events.RunCancelled(at, run.run_id)
    elif by == "policy" and fails:
        last = events.RunFailed(at, run.run_id, decided.error)
    elif by == "policy":
        last = events.RunCompleted(at, run.run_id)
    elif by == "park" or (by == "stop" and run.wakes and not exhausted):
        last = events.RunParked(at, run.run_id, until=at if by == "stop" else iso(parked_until))
    elif by == "refusal" or not exhausted:
        last = events.RunInterrupted(at, run.run_id)
    elif TaskStatus.WAITING_INPUT in state.statuses:
        last = events.RunWaitingInput(at, run.run_id, due_at=min(deadlines(state), default=None))
    elif run.rows_error is not None:
        last = events.RunFailed(at, run.run_id, run.rows_error)
    else:
        last = _exhausted_event(run.run_id, state, at)
    return [*new_events, last]


def deadlines(state: RunState) -> list[float]:
    """Return the deadlines of the open questions, as Unix times in seconds."""
    return [parse_time(one.deadline_at) for one in state.asking.values() if one.deadline_at is not None]


def _exhausted_event(run_id: str, state: RunState, at: str) -> events.RunEnded:
    """Return the last event of a run that ended because nothing was left to run."""
    failed = [result for result in state.results.values() if result.status is TaskStatus.FAILED]
    if not failed:
        return events.RunCompleted(at, run_id)
    blocked = sum(status not in TASK_DONE for status in state.statuses)
    names = ", ".join(result.id for result in failed[:5])
    count = state.counts[TaskStatus.FAILED]  # some may have left memory
    error = f"{count} failed ({names}{', ...' if count > 5 else ''})"
    error += f", {blocked} blocked" if blocked else ""
    return events.RunFailed(at, run_id, f"{error}; {failed[0].id}: {failed[0].error}")


def _is_prompt_and_answer(reply: Reply, prompt: str) -> bool:
    """Return whether the turn consists of `prompt` and the answer, so that no message has to be stored beside the
    result. The store keeps only the tokens of a message's usage.
    """
    if not reply.messages:
        return True
    if len(reply.messages) != 2:
        return False
    sent, answer = reply.messages
    is_same = (sent.role, sent.content, answer.role, answer.content) == ("user", prompt, "assistant", reply.text)
    return (
        is_same
        and not answer.thoughts
        and _tokens(sent.usage) == (0, 0)
        and _tokens(answer.usage) == _tokens(reply.usage)
    )


def _tokens(usage: Usage) -> tuple[int, int]:
    return usage.input_tokens, usage.output_tokens
