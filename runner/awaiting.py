"""Waiting for answers while the run goes on: deadlines, and whoever answers in this process (`on_question`)."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.abc

from runner.errors import PlaitError
from runner.log import logger
from runner.questions import Asking, OpenQuestion, unix
from runner.schedule import Schedule
from runner.state import RunState
from runner.task import JsonValue
from runner.turn import Surroundings


class Awaiting:
    """Waits for answers to the questions of one run. `answer`, `expire` and, where nothing came of
    asking, `look_on` are what is to be called then.
    """

    def __init__(
        self,
        state: RunState,
        schedule: Schedule,
        around: Surroundings,
        answer: Callable[[str, int, JsonValue, str], bool],
        expire: Callable[[int], None],
        look_on: Callable[[], None],
    ) -> None:
        self._state = state
        self._schedule = schedule
        self._around = around
        self._answer = answer
        self._expire = expire
        self._look_on = look_on
        self._deadlines: set[anyio.CancelScope] = set()
        self._log = logger(run=around.run_id)

    def begin(self, workers: anyio.abc.TaskGroup, position: int, asking: Asking) -> None:
        """The task at `position` has just asked."""
        if self._around.on_question is not None:
            self._schedule.hold()
            workers.start_soon(self._ask, position, asking)
        if asking.deadline_at is not None:
            workers.start_soon(self._wait_for_deadline, position, asking, asking.deadline_at)

    def end(self) -> None:
        """Nothing else goes on in the run: deadlines are no reason to stay."""
        for scope in self._deadlines:
            scope.cancel()

    async def _ask(self, position: int, asking: Asking) -> None:
        """Ask whoever answers in this process, once the question is stored."""
        assert self._around.on_question is not None
        await self._around.sink.commit([])
        task_id, attempt = self._state.dag.tasks[position].id, self._state.attempts[position]
        question = OpenQuestion.of(self._around.run_id, task_id, attempt, asking)
        try:
            value = await self._around.on_question(question)
            if value is not None:
                self._answer(task_id, attempt, value, "callback")
        except PlaitError as error:
            self._log.warning("answer_refused", task=task_id, error=str(error))
        except Exception as error:
            self._log.warning("on_question_failed", task=task_id, error=type(error).__name__)
        finally:
            self._schedule.let_go()
        self._look_on()

    async def _wait_for_deadline(self, position: int, asking: Asking, deadline_at: str) -> None:
        clock = self._around.clock
        with anyio.CancelScope() as scope:
            self._deadlines.add(scope)
            while (left := unix(deadline_at) - clock.wall()) > 0:
                await clock.sleep(left)
        self._deadlines.discard(scope)
        if scope.cancelled_caught or self._state.asking.get(position) is not asking:
            return
        if asking.question.default is None:
            self._expire(position)
        else:
            task_id = self._state.dag.tasks[position].id
            self._answer(task_id, self._state.attempts[position], asking.question.default, "default")


def unanswered(question: str) -> str:
    """The error of a task whose question nobody answered in time."""
    return f"nobody answered by the deadline: {question}"[:2000]
