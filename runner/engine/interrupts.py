"""Open questions of a run in execution: the `on_question` callback of this process, and the deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import anyio.abc

from plait.backends.ask import as_here
from plait.errors import PlaitError
from plait.json_form import JsonInput
from plait.program_log import logger
from plait.runner.asyncio_cancellation import Cancels
from plait.runner.domain.asked_question import Asking, OnQuestion, OpenQuestion, parse_time
from plait.runner.engine.attempt import RunContext
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.state.run_state import RunState


class PendingQuestions:
    """Waits for answers to the questions of one run.

    Calls `answer` with an answer of the callback or a default, and `expire` after a deadline without a default. Calls
    `look_on` after each call of the callback, with or without an answer.
    """

    def __init__(
        self,
        state: RunState,
        scheduler: Scheduler,
        context: RunContext,
        answer: Callable[[str, int, JsonInput, str], bool],
        expire: Callable[[int], None],
        look_on: Callable[[], None],
    ) -> None:
        self._state = state
        self._scheduler = scheduler
        self._context = context
        self._answer = answer
        self._expire = expire
        self._look_on = look_on
        self._as_outside = as_here()  # workers start `_ask`, but `_ask` does not run as a worker
        self._calls: dict[int, anyio.CancelScope] = {}
        self._deadlines: dict[int, anyio.CancelScope] = {}
        self._log = logger(run=context.run_id)

    def begin(self, workers: anyio.abc.TaskGroup, position: int, asking: Asking) -> None:
        """Start the callback and the deadline, if any, for the question of the task at `position`."""
        # The scopes are created here because `end` and `close` may be called before the new tasks first run.
        if self._context.on_question is not None:
            task_id, attempt = self._state.dag.tasks[position].id, self._state.attempts[position]
            question = OpenQuestion.of(self._context.run_id, task_id, attempt, asking)
            self._calls[position] = scope = anyio.CancelScope()
            self._scheduler.keep_open()
            workers.start_soon(self._ask, self._context.on_question, question, scope)
        if asking.deadline_at is not None:
            self._deadlines[position] = scope = anyio.CancelScope()
            workers.start_soon(self._wait_for_deadline, position, asking, scope)

    def close(self, position: int) -> None:
        """Cancel the callback and the deadline of a question that is answered or no longer open."""
        for waiting in (self._calls, self._deadlines):
            scope = waiting.pop(position, None)
            if scope is not None:
                scope.cancel()

    def end(self) -> None:
        """Cancel all deadlines, because nothing else is left to do in the run."""
        for scope in self._deadlines.values():
            scope.cancel()

    async def _ask(self, on_question: OnQuestion, question: OpenQuestion, scope: anyio.CancelScope) -> None:
        """Call `on_question` once the question is stored, and pass the answer on. Errors of the callback are logged."""
        cancels = Cancels()
        self._as_outside()
        try:
            with scope:
                await self._context.sink.submit([]).wait()
                value = await on_question(question)
                if value is not None:
                    try:
                        self._answer(question.task_id, question.attempt, value, "callback")
                    except PlaitError as error:
                        self._log.warning("answer_refused", task=question.task_id, error=str(error))
        except (asyncio.CancelledError, Exception) as error:
            if isinstance(error, asyncio.CancelledError) and cancels.since:
                raise
            self._log.warning("on_question_failed", task=question.task_id, error=type(error).__name__)
            self._log.debug("on_question_failed", error, task=question.task_id)
        finally:
            self._scheduler.end_keep_open()
        self._look_on()

    async def _wait_for_deadline(self, position: int, asking: Asking, scope: anyio.CancelScope) -> None:
        assert asking.deadline_at is not None
        clock, task_id, attempt = (
            self._context.clock,
            self._state.dag.tasks[position].id,
            self._state.attempts[position],
        )
        with scope:
            while (left := parse_time(asking.deadline_at) - clock.wall()) > 0:
                await clock.sleep(left)
            # The inbox is read at intervals only: an answer sent in time may still be unread.
            await self._context.look_for_answer(task_id, attempt, asking.deadline_at)
        if scope.cancelled_caught or self._state.asking.get(position) is not asking:
            return
        if asking.question.default is None:
            self._expire(position)
        else:
            self._answer(task_id, attempt, asking.question.default, "default")
